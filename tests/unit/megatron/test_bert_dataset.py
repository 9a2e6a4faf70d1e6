"""BERT samples: what they are cut from, pairs, masks, order; and the sample mapping with its cache."""

import logging
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from megatron.bert_dataset import BertDataset, truncated_lengths
from megatron.sample_mapping import MappingSettings, build_mapping, load_mapping
from tests.helpers.token_toys import token_data

CLS, SEP, MASK, PAD, FIRST = 1, 2, 3, 0, 5


def tokenizer(vocab_size=20_000, continues=(), **changes):
    starts_word = np.ones(vocab_size, bool)
    starts_word[list(continues)] = False
    special = {
        "cls_id": CLS,
        "sep_id": SEP,
        "mask_id": MASK,
        "pad_id": PAD,
        "special_ids": np.array([PAD, CLS, SEP, MASK]),
    }
    settings = {
        "size": vocab_size,
        "starts_word": starts_word,
        "fingerprint": "f" * 64,
        "path": "toy",
        "continuation": "##",
    }
    return SimpleNamespace(**{"unk_id": -1} | special | settings | changes)


def numbered(lengths):
    """Documents in which every token is its place in the file, so that it can be recognised wherever it turns up."""
    place, documents = FIRST, []
    for document in lengths:
        documents.append([])
        for length in document:
            documents[-1].append(list(range(place, place + length)))
            place += length
    return documents


def random_lengths(seed=0, documents=40, sentence=12):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 2 * sentence, rng.integers(2, 25)).tolist() for _ in range(documents)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return token_data(tmp_path_factory.mktemp("data") / "numbered", numbered(random_lengths()))


def dataset(tokens, **settings):
    settings = {"tokenizer": tokenizer(), "max_seq_length": 64, "max_unread": 1.0} | settings
    return Dataset(BertDataset(tokens, **settings))


def rows_of(batch):
    """(A, B, label) of each example with its masked tokens put back."""
    ids = np.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    labels = batch.get("next_sentence_label", np.zeros(len(ids), np.int64)).tolist()
    for row, types, seen, label in zip(ids, batch["token_type_ids"], batch["attention_mask"], labels, strict=True):
        a, b = row[(types == 0) & (seen == 1)], row[types == 1]
        assert a[0] == CLS and a[-1] == SEP and (len(b) == 0 or b[-1] == SEP)
        assert (row[seen == 0] == PAD).all() and (types[seen == 0] == 0).all() and (np.diff(seen) <= 0).all()
        yield a[1:-1].tolist(), b[:-1].tolist(), label


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_the_worked_example(tmp_path):
    words = tokenizer(200, continues=(11, 21, 22), cls_id=101, sep_id=102, mask_id=103, special_ids=[0, 101, 102, 103])
    tokens = token_data(tmp_path / "one", [[[10, 11], [12], [20, 21, 22]]])
    samples = Dataset(BertDataset(tokens, words, max_seq_length=10, short_seq_prob=0)).batch(np.arange(300))
    expected = {
        "input_ids": [101, 10, 11, 103, 102, 20, 21, 22, 102, 0],
        "token_type_ids": [0, 0, 0, 0, 0, 1, 1, 1, 1, 0],
        "attention_mask": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        "labels": [-100, -100, -100, 12, -100, -100, -100, -100, -100, -100],
        "next_sentence_label": 0,
    }
    assert any(all(samples[name][row].tolist() == expected[name] for name in expected) for row in range(300))
    # every word but 12 has more tokens than the one prediction that there is
    masked = samples["labels"] != -100
    assert (samples["labels"][masked] == 12).all() and (masked.sum(axis=1) == 1).all()


@pytest.mark.parametrize("short_seq_prob", [0.0, 0.3])
def test_samples_are_consecutive_sentences_of_one_document(data, short_seq_prob):
    samples = dataset(data, short_seq_prob=short_seq_prob)
    document_of = np.repeat(np.arange(data.num_documents), np.diff(np.append(
        data.sequence_pointers // 2, data.num_tokens)[data.document_indices]))  # fmt: skip
    sentence_starts = set((FIRST + data.sequence_pointers // 2).tolist())
    seen = set()
    for a, b, label in rows_of(samples.batch(np.arange(len(samples)))):
        first, second = (b, a) if label else (a, b)
        assert len(a) + len(b) <= 61 and a and b
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))
        assert first[-1] < second[0] and document_of[first[0] - FIRST] == document_of[second[-1] - FIRST]
        if len(a) + len(b) < 61 and short_seq_prob == 0:  # nothing was cut: B follows A at once
            assert first[-1] + 1 == second[0] and {first[0], second[0]} <= sentence_starts
        seen.update(a + b)
    cut = samples.members[0].mapping.counts.truncated_tokens
    assert len(seen) == data.num_tokens - cut


def test_each_epoch_has_all_samples_with_fresh_noise(data):
    samples = dataset(data)
    epochs = [samples.batch(np.arange(len(samples)) + e * len(samples)) for e in range(2)]
    texts = [sorted(min(a + b) for a, b, _ in rows_of(batch)) for batch in epochs]
    assert np.mean(np.array(texts[0]) == np.array(texts[1])) > 0.5  # the same packing, cut elsewhere
    assert not (epochs[0]["labels"] == epochs[1]["labels"]).all(axis=1).any()


def test_lengths_after_truncation_are_those_of_the_loop():
    for total in (2, 3, 10, 11):
        a, b = (side.ravel() for side in np.meshgrid(np.arange(1, 16), np.arange(16)))
        expected = []
        for left, right in zip(a.tolist(), b.tolist(), strict=True):
            while left + right > total:
                left, right = (left - 1, right) if left > right else (left, right - 1)
            expected.append((left, right))
        assert (
            list(zip(*(x.tolist() for x in truncated_lengths(a, b, np.full_like(a, total))), strict=True)) == expected
        )


def test_tokens_are_cut_from_the_front_as_often_as_from_the_end(tmp_path):
    tokens = token_data(tmp_path / "long", numbered([[100, 300]]))
    samples = dataset(tokens, max_seq_length=43, short_seq_prob=0)
    fronts = [
        (a[0] - FIRST, b[0] - FIRST - 100) for a, b, label in rows_of(samples.batch(np.arange(2000))) if not label
    ]
    for front, cut in zip(np.array(fronts).T, (100 - 20, 300 - 20), strict=True):  # 40 tokens stay, 20 of each
        assert abs(front.mean() - cut / 2) < 4 * np.sqrt(cut / 4 / len(front))
        assert abs(front.var() / (cut / 4) - 1) < 4 * np.sqrt(2 / len(front))


def test_laws_of_pairs_and_masks(tmp_path):
    continues = np.random.default_rng(1).choice(np.arange(FIRST, 15_000), 4000, replace=False)
    tokens = token_data(tmp_path / "many", numbered(random_lengths(documents=90)))
    words = tokenizer(continues=continues)
    samples = dataset(tokens, tokenizer=words, max_seq_length=128)
    batch = samples.batch(np.arange(3000))
    masked, length = batch["labels"] != -100, batch["attention_mask"].sum(axis=1)
    limit = np.maximum(1, np.rint(0.15 * length))
    assert (masked.sum(axis=1) <= limit).all() and masked.sum() / limit.sum() > 0.99
    assert abs((batch["input_ids"][masked] == MASK).mean() - 0.8) < 4 * np.sqrt(0.16 / masked.sum())
    assert abs(batch["next_sentence_label"].mean() - 0.5) < 4 * np.sqrt(0.25 / 3000)
    ids = np.where(masked, batch["labels"], batch["input_ids"])
    assert not masked[ids < FIRST].any()
    inside = ~words.starts_word[ids[:, 1:]] & (ids[:, :-1] >= FIRST)  # continues the token before it
    assert (masked[:, 1:] == masked[:, :-1])[inside].all() and inside.sum() > 10_000
    # pieces instead of words: a continuation is masked alone
    pieces = dataset(tokens, tokenizer=words, max_seq_length=128, whole_word=False, max_ngram=1).batch(np.arange(3000))
    masked = pieces["labels"] != -100
    assert not (masked[:, 1:] == masked[:, :-1])[inside].all()
    assert (masked.sum(axis=1) == limit).all()


def test_splits_are_uniform(tmp_path):
    tokens = token_data(tmp_path / "five", numbered([[3, 3, 3, 3, 3]]))
    samples = dataset(tokens, max_seq_length=18, short_seq_prob=0)
    sizes = [len(a) for a, _, label in rows_of(samples.batch(np.arange(2000))) if not label]
    share = np.bincount(sizes, minlength=13)[3:13:3] / len(sizes)
    np.testing.assert_allclose(share, 0.25, atol=4 * np.sqrt(0.19 / len(sizes)))


def test_nsp_random_takes_b_from_any_other_document(tmp_path):
    lengths = [[10, 10, 10], [5] * 6, [10], [20, 4]]
    tokens = token_data(tmp_path / "others", numbered(lengths))
    bounds = FIRST + np.cumsum([0] + [sum(document) for document in lengths])
    document_of = lambda token: int(np.searchsorted(bounds, token, side="right")) - 1  # noqa: E731
    samples = dataset(tokens, nsp="random", max_seq_length=43, short_seq_prob=0)
    starts = FIRST + tokens.sequence_pointers // 2
    wrong, from_first = 0, []
    for a, b, label in rows_of(samples.batch(np.arange(3000))):
        assert b == list(range(b[0], b[0] + len(b)))
        if not label:
            assert a[-1] + 1 == b[0] and document_of(a[0]) == document_of(b[-1])
            continue
        wrong += 1
        assert document_of(b[0]) == document_of(b[-1]) != document_of(a[0])
        assert b[0] in starts or len(a) + len(b) == 40  # whole sentences, if they were not cut to fit
        end_of_document = b[-1] + 1 in bounds
        assert end_of_document or len(a) + len(b) == 40 or len(a) >= 20  # as many as fit
        if document_of(a[0]) == 0:
            from_first.append(document_of(b[0]))
    assert abs(wrong / 3000 - 0.5) < 4 * np.sqrt(0.25 / 3000)
    share = np.bincount(from_first, minlength=4)[1:] / len(from_first)  # uniform over the sentences of the others
    np.testing.assert_allclose(share, np.array([6, 1, 2]) / 9, atol=4 * np.sqrt(0.25 / len(from_first)))


def test_single_segments_use_documents_of_one_sentence(tmp_path):
    tokens = token_data(tmp_path / "single", numbered([[30], [10, 10], [700], [5]]))
    samples = dataset(tokens, binary_head=False, max_seq_length=32, short_seq_prob=0)
    batch = samples.batch(np.arange(len(samples)))
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert sorted(len(a) for a, b, _ in rows_of(batch) if not b) == [5, 20, 30, 30]
    assert not batch["token_type_ids"].any()


def test_special_tokens_of_the_text_are_not_predicted(tmp_path):
    tokens = token_data(tmp_path / "eod", [[[10, 11, SEP], [12, 13, SEP]]] * 5)
    batch = dataset(tokens, masked_lm_prob=0.9, max_ngram=1).batch(np.arange(500))
    assert set(batch["labels"].ravel().tolist()) == {-100, 10, 11, 12, 13}


@pytest.mark.parametrize("settings", [{}, {"nsp": "random"}, {"binary_head": False}])
def test_a_sample_is_a_function_of_its_number(data, settings):
    samples = dataset(data, **settings)
    numbers = np.random.default_rng(0).integers(0, 5 * len(samples), 150)
    together = samples.batch(numbers)
    for row in range(0, 150, 7):
        alone = samples.batch(numbers[row : row + 1])
        assert all(np.array_equal(alone[name][0], together[name][row]) for name in together)


def test_settings_and_data_that_do_not_go_together_are_refused(tmp_path, data):
    whole = token_data(tmp_path / "documents", numbered([[30], [10], []]))
    long = token_data(tmp_path / "long", numbered([[600, 600]]))
    foreign = token_data(tmp_path / "foreign", numbered([[5, 5]]), meta={"vocab_sha256": "e" * 64})
    for tokens, settings, sentence in [
        (whole, {}, "only documents of one sequence.* --split-sentences"),
        (
            long,
            {"max_sentence_length": 512},
            "gives no sample: of 1 documents with 1,200 tokens.* 1 with a sentence that is too long",
        ),
        (foreign, {}, "were made with the vocabulary .* eeeeeeeeeeee"),
        (token_data(tmp_path / "empty", []), {}, "has no tokens"),
        (token_data(tmp_path / "alone", numbered([[5, 5], []])), {"nsp": "random"}, "one document, but nsp random"),
        (data, {"tokenizer": tokenizer(100)}, "holds id [0-9]+, but the vocabulary has ids 0 to 99"),
        (data, {"max_seq_length": 4}, "max_seq_length is at least 5"),
        (data, {"masked_lm_prob": 0.0}, "probabilities are between 0 and 1"),
        (data, {"max_ngram": 0}, "counts are positive"),
    ]:
        with pytest.raises(UserError, match=sentence):
            dataset(tokens, **settings)
    assert len(dataset(long)) == 1


def test_a_long_sentence_is_cut_and_its_document_read(tmp_path, caplog):
    lengths = [20, 20, 700, 20, 20]
    tokens = token_data(tmp_path / "long", numbered([lengths]))
    with caplog.at_level(logging.INFO):
        samples = dataset(tokens, short_seq_prob=0, binary_head=False)
    room = samples.members[0].max_seq_length - 2
    seen = {token for a, b, _ in rows_of(samples.batch(np.arange(40 * len(samples)))) for token in a + b}
    long = {*tokens.tokens[40:740].tolist()}
    assert {*tokens.tokens[740:].tolist()} <= seen and len(seen & long) > room  # other parts in other epochs
    assert "0 with a sentence that is too long" in caplog.text
    assert f"in 1 sentences longer than any sample: {700 - room} tokens" in caplog.text


@pytest.mark.parametrize("binary_head", [False, True])
def test_what_no_sample_has_room_for_is_what_an_epoch_does_not_read(tmp_path, caplog, binary_head):
    # more than a sample, two sentences, one short one, one longer than max_sentence_length
    tokens = token_data(tmp_path / "mixed", numbered([[1000], [30, 20], [50], [513, 7], [300, 1]]))
    samples = dataset(tokens, binary_head=binary_head, short_seq_prob=0, max_sentence_length=512)
    seen = {token for a, b, _ in rows_of(samples.batch(np.arange(len(samples)))) for token in a + b}
    counts = samples.members[0].mapping.counts
    unread = counts.few_sentences_tokens + 520 + counts.overlong_tokens
    # besides, a pair leaves out one token where a sentence of 1 stands beside one that fills the sample
    assert len(seen) == tokens.num_tokens - unread - (counts.truncated_tokens - counts.overlong_tokens)
    assert counts.unread == pytest.approx((1050 + 520 + 239 if binary_head else 1000 - 62 + 520 + 238) / 1921)
    assert f"{counts.unread:.1%} of the tokens fit in no sample of 64" in caplog.text


def test_data_most_of_which_no_sample_has_room_for_is_refused_unless_it_is_allowed(tmp_path, caplog):
    whole = token_data(tmp_path / "whole", numbered([[1000], [900], [40]]), meta={"level": "document"})
    with pytest.raises(
        UserError, match=r"91.5% of the tokens fit in no sample of 64; .*without --split-sentences: pre"
    ):
        dataset(whole, binary_head=False, max_unread=0.5)
    assert len(dataset(whole, binary_head=False, max_unread=0.92)) == 3
    assert "91.5% of the tokens" in caplog.text
    long = token_data(tmp_path / "long", numbered([[600, 600], [10, 10]]))
    with pytest.raises(UserError, match=r"raise --max_sentence_length 512 .*allow it with --max_unread 1"):
        dataset(long, max_unread=0.5, max_sentence_length=512)
    lone = token_data(tmp_path / "lone", numbered([[30], [30], [10, 10]]))
    with pytest.raises(UserError, match=r"give longer documents, or leave out sentence pairs .--use_nsp 0."):
        dataset(lone, max_unread=0.5)
    with pytest.raises(UserError, match="raise --input_seq_len 12"):
        dataset(lone, max_unread=0.4, binary_head=False, max_seq_length=12)


def test_fingerprint_names_data_tokenizer_and_settings(tmp_path, data):
    changes = {
        "seed": 1, "max_seq_length": 63, "masked_lm_prob": 0.2, "short_seq_prob": 0.2, "binary_head": False,
        "nsp": "random", "whole_word": False, "max_ngram": 2, "max_sentence_length": 512, "num_epochs": 2,
        "mask_label_id": -1, "tokenizer": tokenizer(fingerprint="e" * 64),
    }  # fmt: skip
    single = [{}, *({name: value} for name, value in changes.items())]
    prints = [dataset(data, cache_dir=tmp_path, **change).fingerprint for change in single]
    assert len(set(prints)) == len(prints) and prints[0] == dataset(data).fingerprint


@pytest.mark.parametrize(
    ("num_epochs", "max_num_samples", "passes"), [(None, None, 1), (3, None, 3), (None, 100, None), (2, 10**6, 2)]
)
def test_passes_are_limited_by_epochs_and_samples(data, tmp_path, num_epochs, max_num_samples, passes):
    one, limits = len(dataset(data)), {"num_epochs": num_epochs, "max_num_samples": max_num_samples}
    length = len(dataset(data, cache_dir=tmp_path, **limits))
    expected = passes or -(-max_num_samples // one)
    assert abs(length - expected * one) <= 0.1 * expected * one  # each pass draws its own short samples


# the sample mapping


def test_a_mapping_does_not_depend_on_how_it_is_chunked(monkeypatch):
    rng = np.random.default_rng(0)
    documents = np.concatenate([[0], np.cumsum(rng.integers(0, 40, 300))])
    lengths = rng.integers(1, 60, documents[-1]).astype(np.int32)
    settings = MappingSettings(100, 2, 0.2, max_sentence_length=58, num_epochs=2)
    whole = build_mapping(documents, lengths, settings)
    monkeypatch.setattr("megatron.sample_mapping._CHUNK", 50)
    chunked = build_mapping(documents, lengths, settings)
    np.testing.assert_array_equal(chunked.rows, whole.rows)
    assert chunked.counts == whole.counts and whole.counts.long_sentence_documents > 0


def load_and_report(prefix, cache, start, results):
    tokens = IndexedDataset(prefix)
    start.wait()
    mapping = load_mapping(tokens, MappingSettings(61), cache)
    results.put((mapping.rows.tobytes(), str(mapping.path)))


def test_processes_that_start_at_once_share_one_mapping(data, tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    arguments = (data.prefix, tmp_path / "new" / "cache", start, results)
    processes = [context.Process(target=load_and_report, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(found) == 1
    names = sorted(path.suffix for path in (tmp_path / "new" / "cache").iterdir())
    assert names == [".json", ".npy"]  # and no temporary file


def test_a_damaged_mapping_is_noticed_and_built_again(data, tmp_path, caplog):
    mapping = load_mapping(data, MappingSettings(61), tmp_path)
    good, rows, record = mapping.path.read_bytes(), np.array(mapping.rows), mapping.path.with_suffix(".json")
    rng = np.random.default_rng(0)
    for number in range(30):
        broken = bytearray(good)
        if number % 3 == 0:
            del broken[int(rng.integers(0, len(good))) :]
        else:
            broken[int(rng.integers(0, 128 if number % 3 == 1 else len(good)))] ^= 1 << int(rng.integers(8))
        mapping.path.write_bytes(broken)
        again = load_mapping(data, MappingSettings(61), tmp_path)
        np.testing.assert_array_equal(again.rows, rows)
        assert mapping.path.read_bytes() == good
    assert caplog.text.count("is damaged") == 30
    for content in (b"", b"{", b"[]", b'{"rows": 1}'):
        record.write_bytes(content)
        np.testing.assert_array_equal(load_mapping(data, MappingSettings(61), tmp_path).rows, rows)
    before = mapping.path.stat().st_mtime_ns
    load_mapping(data, MappingSettings(61), tmp_path)
    assert mapping.path.stat().st_mtime_ns == before


def test_where_nothing_can_be_written_the_mapping_stays_in_memory(data, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    mapping = load_mapping(data, MappingSettings(61), tmp_path / "file" / "cache")
    assert mapping.path is None and "cannot be written" in caplog.text
    np.testing.assert_array_equal(mapping.rows, load_mapping(data, MappingSettings(61), tmp_path).rows)


def test_other_settings_have_other_files(data, tmp_path):
    changes = [{}, {"seed": 1}, {"min_sentences": 1}, {"short_seq_prob": 0.2}, {"num_epochs": 2}]
    paths = {load_mapping(data, MappingSettings(61, **change), tmp_path).path for change in changes}
    assert len(paths) == len(changes)
