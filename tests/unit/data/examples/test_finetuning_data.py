"""Fine-tuning data: the rows are what Hugging Face makes of the same texts, each example once, in one order."""

import csv
import gzip
import json
import logging
import random
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from lm_experiments_tools.data.examples.examples import LabelFields, TextFields, label_examples, text_examples
from lm_experiments_tools.data.text.records import RejectedRecords, rows
from lm_experiments_tools.labels import IGNORED_LABEL
from tests.helpers.finetuning_toys import WORDS, pairs, read, word_tokenizer, write_json
from tests.helpers.real_data import DATA, lacking

VOCABS = DATA / "vocabs"
SCITLDR = DATA / "seq2seq" / "scitldr"
CLASSES = DATA / "classification"


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    path = VOCABS / "t5_32k" / "sentencepiece.model"
    if reason := lacking(path, SCITLDR, CLASSES):
        pytest.skip(reason)
    from lm_experiments_tools.data.text.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("t5")
    Tokenizer.load(path).save(folder)
    return AutoTokenizer.from_pretrained(folder, model_max_length=64)


@pytest.fixture(scope="module")
def bert():
    if reason := lacking(VOCABS / "bert-base-uncased", CLASSES):
        pytest.skip(reason)
    return AutoTokenizer.from_pretrained(VOCABS / "bert-base-uncased")


def head(path, lines, folder):
    short = folder / path.name
    short.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]), encoding="utf-8")
    return str(short)


def rows_of(batch):
    """The rows of a batch without padding, each as a tuple of its entries."""
    return [
        (batch["input_ids"][n][batch["attention_mask"][n] > 0].tolist(), batch["labels"][n].tolist())
        for n in range(len(batch["input_ids"]))
    ]


def test_rows_are_those_of_huggingfaces_seq2seq_collator(t5, tmp_path, caplog):
    path = head(SCITLDR / "validation.json", 48, tmp_path)
    caplog.set_level(logging.INFO)
    flags = {"prefix": "summarize: ", "input_seq_len": 256, "target_seq_len": 40, "batch_size": 16}
    split = read(t5, data_path=(path,), valid_data_path=path, **flags).splits["valid"]
    collator = DataCollatorForSeq2Seq(t5, pad_to_multiple_of=8)
    seen = 0
    for batch in split.loader:
        chosen = [split.examples[number] for number in batch.pop("example").tolist()]
        sources = t5([example.source for example in chosen], truncation=True, max_length=256)
        targets = t5(text_target=[example.targets[0] for example in chosen], truncation=True, max_length=40)
        features = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in sources["input_ids"]]
        expected = collator([f | {"labels": ids} for f, ids in zip(features, targets["input_ids"], strict=True)])
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        for name, values in batch.items():
            assert torch.equal(values, expected[name]), name
        seen += len(chosen)
    assert seen == 48
    rows = [json.loads(line)["translation"] for line in open(path, encoding="utf-8")]
    assert [example.source for example in split.examples] == ["summarize: " + row["s"] for row in rows]
    assert [example.targets for example in split.examples] == [(row["t"],) for row in rows]
    assert "Token indices sequence length" not in caplog.text
    whole = [len(ids) for ids in t5([example.source for example in split.examples], verbose=False)["input_ids"]]
    long = [length for length in whole if length > 256]
    lost = sum(length - 256 for length in long) / sum(long)
    assert 0 < len(long) < 48
    assert f"{len(long)} of 48 sources ({len(long) / 48:.1%}) are longer than --input_seq_len 256" in caplog.text
    assert f"lost {lost:.0%} of their tokens (the longest has {max(whole)})" in caplog.text


@pytest.mark.parametrize("limit", [24, 128])
def test_pairs_are_those_of_the_tokenizers_own_call(bert, limit, tmp_path):
    path = head(CLASSES / "mnli_subset" / "dev.tsv", 60, tmp_path)
    flags = {"model_type": "encoder", "task": "classification", "optimize_metric": "loss"}
    data = read(bert, data_path=(path,), valid_data_path=path, input_seq_len=limit, batch_size=16, **flags)
    assert data.label_names == ("contradiction", "entailment", "neutral")
    with open(path, encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    for batch in data.splits["valid"].loader:
        chosen = [rows[number] for number in batch["example"].tolist()]
        expected = bert(
            *([row[name] for row in chosen] for name in ("sentence1", "sentence2")),
            **{"truncation": True, "max_length": limit, "padding": True, "pad_to_multiple_of": 8},
            return_tensors="pt",
        )
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            assert torch.equal(batch[name], expected[name]), name
        assert [data.label_names[label] for label in batch["labels"].tolist()] == [row["label"] for row in chosen]


@pytest.mark.parametrize("end", ["template", "token"])
def test_decoder_rows_are_source_target_and_end(end, tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"source": "w0 w1 w2", "target": "w5"}, {"source": "w7", "target": "w8"}])
    flags = {"model_type": "decoder", "input_seq_len": 16, "target_seq_len": 4, "pad_to_multiple_of": None}
    data = read(word_tokenizer(end), data_path=(path,), valid_data_path=path, **flags)
    (batch,) = data.splits["valid"].loader
    assert batch["example"].tolist() == [0, 1]  # the longest first
    assert batch["input_ids"].tolist() == [[3, 4, 5, 8, 1], [10, 11, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 1], [-100, 11, 1, -100, -100]]
    assert batch["prompt_ids"].tolist() == [[3, 4, 5], [0, 0, 10]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert set(next(data.train)) == {"input_ids", "attention_mask", "labels", "example"}
    data.train.close()


def test_decoder_prompt_is_cut_alike_whatever_the_target(tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"source": " ".join(WORDS[:30]), "target": "w5"}])
    flags = {"model_type": "decoder", "input_seq_len": 16, "target_seq_len": 4, "pad_to_multiple_of": None}
    (batch,) = read(word_tokenizer(), data_path=(path,), valid_data_path=path, **flags).splits["valid"].loader
    assert batch["prompt_ids"].tolist() == [list(range(3, 15))]
    assert batch["input_ids"].tolist() == [[*range(3, 15), 8, 1]]


@pytest.mark.parametrize("end", ["template", "token"])
def test_targets_of_an_encoder_decoder_end_in_eos_when_cut_too(end, tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"source": "w1", "target": " ".join(WORDS[:9])}])
    data = read(word_tokenizer(end), data_path=(path,), valid_data_path=path, target_seq_len=4)
    (batch,) = data.splits["valid"].loader
    assert batch["labels"].tolist() == [[3, 4, 5, 1]]


@pytest.mark.parametrize("packing", [False, True])
def test_order_is_the_same_for_any_number_of_workers_and_each_epoch_has_each_example_once(packing, tmp_path):
    path = write_json(tmp_path / "a.jsonl", pairs(48))
    flags = {"data_path": (path,), "packing": packing, "input_seq_len": 32, "target_seq_len": 16}

    def steps(world_size, batch_size, count):
        loaders = [
            read(word_tokenizer(), r, world_size, batch_size=batch_size, **flags).train for r in range(world_size)
        ]
        found = []
        for _ in range(count):
            batches = [rows_of(next(loader)) for loader in loaders]
            found.append([tuple(map(tuple, batches[k % world_size][k // world_size])) for k in range(12)])
        for loader in loaders:
            loader.close()
        return [[(ids, tuple(i for i in labels if i != -100)) for ids, labels in step] for step in found]

    alone = steps(1, 12, 8)
    assert alone == steps(2, 6, 8) == steps(3, 4, 8)
    if not packing:
        expected = Counter(tuple(int(word[1:]) + 3 for word in row["source"].split()) + (1,) for row in pairs(48))
        for epoch in (alone[:4], alone[4:]):
            assert Counter(ids for step in epoch for ids, _ in step) == expected
        assert alone[:4] != alone[4:]


def test_fingerprint_tells_content_and_settings_but_not_workers(tmp_path):
    path, other = (write_json(tmp_path / f"{n}.jsonl", pairs(20 + n)) for n in range(2))

    def fingerprint(rank=0, world_size=1, tokenizer=None, **flags):
        flags = {"data_path": (path,), "batch_size": 12 // world_size} | flags
        return read(tokenizer or word_tokenizer(), rank, world_size, **flags).train.fingerprint

    same = fingerprint()
    assert fingerprint(1, 2) == fingerprint(2, 3) == same
    assert fingerprint(num_beams=4, metrics=("bleu",)) == same
    changed = [
        fingerprint(data_path=(other,)),
        fingerprint(seed=1),
        fingerprint(input_seq_len=10),
        fingerprint(target_seq_len=3),
        fingerprint(prefix="w1 "),
        fingerprint(max_train_samples=19),
        fingerprint(bucket_rows=3),
        fingerprint(packing=True, target_seq_len=64),
        fingerprint(model_type="decoder"),
    ]
    assert len({same, *changed}) == 1 + len(changed)


@pytest.mark.parametrize("task", ["text_to_text", "classification"])
def test_choices_of_examples_are_the_same_whatever_the_seed(task, tmp_path):
    rows = [row | {"text": row["source"], "label": number % 3} for number, row in enumerate(pairs(40))]
    path = write_json(tmp_path / "a.jsonl", rows)

    def chosen(seed):
        flags = {"max_train_samples": 7, "valid_samples": 9, "seed": seed, "task": task, "batch_size": 7}
        flags |= {"label_words": ("w1", "w2", "w3")} if task == "classification" else {}
        data = read(word_tokenizer(), data_path=(path,), valid_data_path=path, optimize_metric="loss", **flags)
        train = sorted(str(row) for row in rows_of(next(data.train)))
        data.train.close()
        order = [batch["example"].tolist() for batch in data.splits["valid"].loader]
        return train, data.splits["valid"].examples, data.splits["valid"].loader.dataset.fingerprint, order

    first, second = chosen(1), chosen(2)
    assert first == second and len(first[0]) == 7 and len(first[1]) == 9
    names = [int(example.name) for example in first[1]]
    assert names == sorted(names) and names != list(range(9))


def test_csv_is_read_as_the_csv_module_reads_it_and_tsv_without_quotation(tmp_path):
    rng = random.Random(0)
    letters = ['"', ",", "\n", "\r\n", "\t", "a", "é", " ", "'", "\\"]
    table = [["source", "target"]] + [["".join(rng.choices(letters, k=9)) + "x" for _ in "st"] for _ in range(200)]
    path = tmp_path / "a.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(table)
    with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
        expected = list(csv.DictReader(file))
    found = list(rows(str(path), RejectedRecords(0)))
    assert [row.value for row in found] == expected
    assert found[3].where == f"{path}:{2 + sum(line.count(chr(10)) for row in table[1:4] for line in row) + 3}"
    tsv = tmp_path / "a.tsv"
    tsv.write_text('source\ttarget\n"w1\tsay ""w2"\n\nw3\tw4\n', encoding="utf-8")
    assert [row.value for row in rows(str(tsv), RejectedRecords(0))] == [
        {"source": '"w1', "target": 'say ""w2"'},
        {"source": "w3", "target": "w4"},
    ]


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"translation": {"s": "a", "t": "b"}}, {}, ("a", ("b",))),
        ({"translation": {"en": "a", "de": "b"}}, {"source": "en", "target": "de"}, ("a", ("b",))),
        ({"source": "a", "targets": ["b", "c"]}, {}, ("a", ("b", "c"))),
        ({"input": "a", "output": "b", "id": 7}, {}, ("a", ("b",))),
        ({"article": "a", "summary": "b"}, {"prefix": "summarize: "}, ("summarize: a", ("b",))),
    ],
)
def test_sources_and_targets_are_found_by_their_names(row, fields, expected, tmp_path):
    path = write_json(tmp_path / "a.json", [row])
    (example,) = text_examples(path, TextFields(**fields), RejectedRecords(0), merge=True)
    assert (example.source, example.targets) == expected
    assert example.name == str(row.get("id", 0))


def test_empty_targets_and_numbers_are_texts_that_are_trained(tmp_path, caplog):
    rows = [{"source": f"w{n}", "target": target} for n, target in enumerate(("w5", "", " ", 3, 0.5, True, ["", 7]))]
    path = write_json(tmp_path / "a.jsonl", rows)
    tokenizer = word_tokenizer()
    data = read(tokenizer, data_path=(path,), valid_data_path=path, bucket_rows=1, batch_size=7)
    texts = ["w5", "", "", "3", "0.5", "True", ""]
    assert [example.targets for example in data.splits["valid"].examples] == [*((t,) for t in texts[:6]), ("", "7")]
    batch = next(data.train)
    data.train.close()
    found = {n: ids for n, (_, ids) in zip(batch["example"].tolist(), rows_of(batch), strict=True)}
    expected = tokenizer(text_target=texts)["input_ids"]
    assert [[i for i in found[n] if i != IGNORED_LABEL] for n in range(7)] == expected
    assert caplog.text.count("a.jsonl: the target of 3 of 7 examples is empty") == 2  # of training and validation


def test_a_test_set_of_empty_targets_has_none(tmp_path, caplog):
    path = write_json(tmp_path / "a.jsonl", [{"source": "w1", "target": "w2"}])
    (tmp_path / "test.csv").write_text("source,target\nw1,\nw2,\n")
    data = read(word_tokenizer(), data_path=(path,), test_data_path=str(tmp_path / "test.csv"))
    assert [example.targets for example in data.splits["test"].examples] == [(), ()]
    assert "has a target" in caplog.text


def test_rows_of_one_document_are_examples_of_their_own_in_evaluation(tmp_path):
    rows = [{"id": f"doc{n // 4}", "source": f"w{n}", "target": f"w{n % 3}"} for n in range(12)]
    path = write_json(tmp_path / "a.jsonl", rows)
    examples = read(word_tokenizer(), data_path=(path,), valid_data_path=path).splits["valid"].examples
    assert [(e.name, e.source, *e.targets) for e in examples] == [(r["id"], r["source"], r["target"]) for r in rows]


def test_null_is_no_id(tmp_path):
    """Such rows are numbered, as rows without one are."""
    rows = [{"id": None, "source": word, "target": "w1"} for word in WORDS[:3]]
    rows += [{"id": None, "pid": "p", "source": "w3", "target": "w1"}]
    path = write_json(tmp_path / "null.jsonl", rows)
    names = [example.name for example in text_examples(path, TextFields(), RejectedRecords(0), merge=True)]
    assert names == ["0", "1", "2", "p"]
    path = write_json(tmp_path / "labels.jsonl", [{"id": None, "sentence": word, "label": 1} for word in WORDS[:3]])
    examples = label_examples(path, LabelFields(), RejectedRecords(0), names=("1", "2"))
    assert [example.name for example in examples] == ["0", "1", "2"]


def test_rows_of_one_id_are_one_example_of_several_references_in_evaluation_alone(tmp_path):
    rows = [
        {"id": f"q{n // 3}", "pid": f"q{n // 3}_{n % 3}", "input": f"w{n // 3}", "output": f"w{n}"} for n in range(9)
    ]
    path = write_json(tmp_path / "a.jsonl", rows)
    data = read(word_tokenizer(), data_path=(path,), valid_data_path=path)
    assert len(data.train.dataset) == 9
    assert [example.targets for example in data.splits["valid"].examples] == [
        tuple(f"w{n}" for n in range(3 * k, 3 * k + 3)) for k in range(3)
    ]
    assert [example.name for example in data.splits["valid"].examples] == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([10, 9, 9], ("9", "10")),
        (["1.5", "-2"], ("-2", "1.5")),
        ([1.0, 0.0], ("0", "1")),
        (["1.0", "2.10", "2.0", "-inf"], ("-inf", "1", "2", "2.10")),
    ],
)
def test_labels_are_those_of_the_training_data_in_order(labels, expected, tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"text": "w1", "label": label} for label in labels])
    flags = {"model_type": "encoder", "task": "classification", "optimize_metric": "loss"}
    data = read(word_tokenizer(), data_path=(path,), **flags)
    assert data.label_names == expected


@pytest.mark.parametrize(
    ("number", "text"), [(3.8, "3.8"), (2.87, "2.8"), (2.91, "3.0"), (0, "0.0"), (-0.05, "0.0"), ("4.999", "5.0")]
)
def test_numbers_are_text_as_t5_has_them(number, text, tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"sentence1": "a", "sentence2": "b", "score": number}])
    (example,) = label_examples(path, LabelFields(), RejectedRecords(0), words=())
    assert example.targets == (text,) and example.label == float(number)
    (example,) = label_examples(path, LabelFields(), RejectedRecords(0))
    assert (example.source, example.pair, example.label) == ("a", "b", float(number))


def test_values_of_a_regression_are_float_labels(tmp_path):
    path = write_json(tmp_path / "a.jsonl", [{"text": "w1", "label": "0.25"}, {"text": "w1 w2", "label": 3}])
    flags = {"model_type": "encoder", "task": "regression", "optimize_metric": "loss"}
    (batch,) = read(word_tokenizer(), data_path=(path,), valid_data_path=path, **flags).splits["valid"].loader
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [3.0, 0.25]


def test_causal_lm_predicts_every_token_of_the_documents_once(tmp_path):
    texts = [" ".join(WORDS[n : n + 5 + n]) for n in range(9)]
    path = write_json(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    flags = {"model_type": "decoder", "task": "causal_lm", "input_seq_len": 8, "optimize_metric": "perplexity"}
    tokenizer = word_tokenizer("token")
    data = read(tokenizer, data_path=(path,), valid_data_path=path, batch_size=3, **flags)
    stream = [i for text in texts for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], 1]]
    follows = Counter(zip([1, *stream], stream, strict=False))
    found = Counter()
    for batch in data.splits["valid"].loader:
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            found.update((a, b) for a, b in zip(ids[:-1], labels[1:], strict=True) if b != IGNORED_LABEL)
    assert found == follows
    assert len(data.train.dataset) == -(-len(stream) // 7)


def test_causal_lm_of_a_folder_validates_on_its_validation_file(tmp_path):
    write_json(tmp_path / "train.jsonl", [{"text": "w1 w1 w1 w1"}] * 40)
    write_json(tmp_path / "val.jsonl", [{"text": "w2 w2 w2"}] * 40)
    flags = {"model_type": "decoder", "task": "causal_lm", "input_seq_len": 8, "optimize_metric": "perplexity"}
    tokenizer = word_tokenizer()
    data = read(tokenizer, data_path=(str(tmp_path),), valid_data_path=str(tmp_path), **flags)
    seen = {number for batch in data.splits["valid"].loader for number in batch["input_ids"].flatten().tolist()}
    one, two = tokenizer.convert_tokens_to_ids(["w1", "w2"])
    assert two in seen and one not in seen


def test_a_label_of_unusable_rows_alone_is_no_class(tmp_path):
    rows = [{"text": f"w{n}", "label": "ac"[n % 2]} for n in range(8)] + [{"text": "", "label": "b"}]
    path = write_json(tmp_path / "a.jsonl", rows)
    flags = {"model_type": "encoder", "task": "classification", "max_bad_lines": 1}
    assert read(word_tokenizer(), data_path=(path,), **flags).label_names == ("a", "c")
