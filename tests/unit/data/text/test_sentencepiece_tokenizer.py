"""Both kinds of vocabulary against the facts of T5's own and against what transformers makes of the saved files."""

import json
import pickle

import numpy as np
import pytest
import sentencepiece

from lm_experiments_tools.data.text.records import Record
from lm_experiments_tools.data.text.sentencepiece_tokenizer import SentencePieceTokenizer
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.tokenize import TextEncoder
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.train_vocabulary import train_vocab
from tests.helpers.real_data import DATA, lacking
from tests.helpers.token_toys import write_jsonl
from tests.helpers.vocabulary_toys import train_vocabulary

T5_32K = DATA / "vocabs" / "t5_32k" / "sentencepiece.model"
CORPUS = DATA / "corpus" / "validation.jsonl"

needs_t5_32k = pytest.mark.skipif(not T5_32K.is_file(), reason=lacking(T5_32K) or "")


def sentences(count):
    if reason := lacking(CORPUS):
        pytest.skip(reason)
    found = []
    with open(CORPUS, encoding="utf-8") as file:
        for line in file:
            found += [part for part in json.loads(line)["text"].splitlines() if 20 < len(part) < 400][:3]
    return found[:count]


@pytest.fixture(scope="session")
def own_model(tmp_path_factory):
    """A vocabulary as `lmtools vocab` makes them: 400 ids, the last 100 are sentinels."""
    folder = tmp_path_factory.mktemp("vocab")
    text = [f"The {word} is a thing of beauty and number {i}." for i, word in enumerate(dir(np) * 3)]
    train_vocab([write_jsonl(folder / "text.jsonl", text)], 400, folder / "own.model")
    return folder / "own.model"


@pytest.fixture(params=["google", "own"])
def vocabulary(request, own_model):
    if request.param == "google" and not T5_32K.is_file():
        pytest.skip(lacking(T5_32K))
    return Tokenizer.load(T5_32K if request.param == "google" else own_model)


@needs_t5_32k
def test_googles_vocabulary_has_the_published_ids():
    vocabulary = Tokenizer.load(T5_32K)
    assert (vocabulary.size, len(vocabulary.sentinel_ids)) == (32100, 100)
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.sentinel_ids.tolist() == list(range(32099, 31999, -1))
    assert vocabulary.encode("Hello, world!") == [8774, 6, 296, 55]


def test_own_vocabulary_has_its_sentinels_inside(own_model):
    vocabulary = Tokenizer.load(own_model)
    assert (vocabulary.size, len(vocabulary.sentinel_ids)) == (400, 100)
    assert vocabulary.sentinel_ids.tolist() == list(range(399, 299, -1))
    # the file itself does know its sentinels, so the next test is not empty
    assert 399 in sentencepiece.SentencePieceProcessor(model_file=str(own_model)).encode("a <extra_id_0> b")


def test_text_cannot_forge_a_sentinel(vocabulary):
    ids = vocabulary.encode("The <extra_id_0> and<extra_id_99> </s> <pad>")
    assert not np.isin(ids, vocabulary.sentinel_ids).any()
    assert 0 not in ids and 1 not in ids
    assert vocabulary.encode_batch(["The number", ""])[1] == []


def test_decode_shows_sentinels_and_drops_padding(vocabulary):
    s = vocabulary.sentinel_ids
    ids = [*vocabulary.encode("The thing"), s[0], *vocabulary.encode("beauty"), s[1], vocabulary.eos_id, 0, 0]
    assert vocabulary.decode(ids) == "The thing <extra_id_0> beauty <extra_id_1>"
    assert vocabulary.decode(np.array([s[0], s[99]])) == "<extra_id_0> <extra_id_99>"
    assert vocabulary.decode([]) == ""
    assert vocabulary.decode([-100, s[0], -100]) == "<extra_id_0>"  # of ignored labels
    assert vocabulary.decode([vocabulary.size, vocabulary.size + 7]).split() == ["⁇", "⁇"]  # of a padded embedding
    assert vocabulary.decode(vocabulary.encode("The number is 12.")) == "The number is 12."


@needs_t5_32k
def test_googles_saved_tokenizer_gives_the_same_ids_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary = Tokenizer.load(T5_32K)
    vocabulary.save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    texts = sentences(100)
    assert len(texts) == 100
    for text in texts:
        assert tokenizer(text).input_ids == [*vocabulary.encode(text), vocabulary.eos_id]
    assert len(tokenizer) == vocabulary.size
    names = [f"<extra_id_{k}>" for k in range(len(vocabulary.sentinel_ids))]
    assert tokenizer.convert_tokens_to_ids(names) == vocabulary.sentinel_ids.tolist()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    again = Tokenizer.load(tmp_path)
    assert again.size == vocabulary.size and again.encode(texts[0]) == vocabulary.encode(texts[0])


def test_saving_over_another_tokenizer_replaces_it(own_model, tmp_path):
    transformers = pytest.importorskip("transformers")
    for model in (trained(tmp_path, KINDS["bpe"]), own_model):
        Tokenizer.load(model).save(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert len(tokenizer) == 400 and type(tokenizer).__name__.startswith("T5Tokenizer")


def test_pickling_keeps_ids(vocabulary):
    copy = pickle.loads(pickle.dumps(vocabulary))
    assert copy.encode("The thing 12") == vocabulary.encode("The thing 12") and copy.size == vocabulary.size
    assert copy.fingerprint == vocabulary.fingerprint


def test_bad_files_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Tokenizer.load(tmp_path / "none.model")
    with pytest.raises(UserError, match=r"has no tokenizer_config\.json.* name its \.model file"):
        Tokenizer.load(tmp_path)
    for content in (b"", b"not a model at all", b"\x00" * 100):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(UserError, match="is not a SentencePiece model"):
            Tokenizer.load(tmp_path / "bad.model")


def test_vocabulary_without_padding_is_refused(tmp_path):
    with pytest.raises(UserError, match="no padding piece '<pad>'"):
        Tokenizer.load(trained(tmp_path, {"pad_id": -1}))


HELD_OUT = [
    "A sentence that no vocabulary here was trained on: 42 of 1,000 words, isn't it?",
    "na\u00efve \ufb01ne\u00a0text\twith \U0001f600 and  two  spaces ",
    "def encode(self, text): return [x for x in text if x != '<extra>']",
]
KINDS = {
    "unigram": {},
    "bpe": {"model_type": "bpe"},
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True},
    "identity": {"normalization_rule_name": "identity"},
    "no dummy prefix": {"add_dummy_prefix": False},
    "across spaces": {"split_by_whitespace": False},
    "user-defined pieces": {"user_defined_symbols": ["[NLU]", "thing of", "ing"]},
    "other special ids": {"unk_id": 0, "pad_id": 1, "eos_id": 2},
    "controls": {"bos_id": 3, "control_symbols": ["[CLS]"]},
}
REFUSED = {
    "words": {"model_type": "word", "vocab_size": 250},
    "suffix": {"treat_whitespace_as_suffix": True},
    "all spaces": {"remove_extra_whitespaces": False},
}


def trained(folder, options):
    lines = [
        f"The {word} is a thing of beauty and number {i}, seen in {word}(x)." for i, word in enumerate(dir(np) * 2)
    ]
    return train_vocabulary(folder / "v.model", lines, 600, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_tokenizer_encodes_as_sentencepiece_whatever_the_algorithm(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    model = trained(tmp_path, KINDS[kind])
    vocabulary = Tokenizer.load(model)
    vocabulary.save(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = [*HELD_OUT, *(sentences(100) if CORPUS.is_file() else ())]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert ids == [*processor.encode(text), vocabulary.eos_id], text
        if vocabulary.unk_id not in ids:
            assert tokenizer.decode(ids, skip_special_tokens=True) == processor.decode(ids[:-1])
    assert (len(tokenizer), tokenizer.unk_token_id) == (vocabulary.size, vocabulary.unk_id)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (vocabulary.pad_id, vocabulary.eos_id)
    names = [f"<extra_id_{k}>" for k in range(len(vocabulary.sentinel_ids))]
    assert tokenizer.convert_tokens_to_ids(names) == vocabulary.sentinel_ids.tolist()
    again = Tokenizer.load(tmp_path / "saved")
    assert again.sentinel_ids.tolist() == vocabulary.sentinel_ids.tolist()
    assert [list(again.encode(text)) for text in texts] == [vocabulary.encode(text) for text in texts]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_vocabulary_that_transformers_would_encode_otherwise_is_refused(tmp_path, kind):
    pytest.importorskip("transformers")
    vocabulary = Tokenizer.load(trained(tmp_path, REFUSED[kind]))
    with pytest.raises(UserError, match=r"cannot be saved as a Hugging Face tokenizer.*transformers as"):
        vocabulary.save(tmp_path / "saved")


def test_lines_keep_their_borders_where_the_first_word_has_no_mark(tmp_path):
    vocabulary = Tokenizer.load(trained(tmp_path, KINDS["no dummy prefix"]))
    text = "a thing of\nbeauty and number"
    encoder = TextEncoder(vocabulary)
    assert vocabulary.decode(encoder.encode(encoder.parts(Record(text, "", 1))).ids) == "a thing of beauty and number"


NAMES = [f"<extra_id_{k}>" for k in range(20)]
INSIDE = {
    "low ids": {"user_defined_symbols": NAMES},
    "low ids, reversed": {"user_defined_symbols": NAMES[::-1]},
    "mT5": {"user_defined_symbols": [f"\u2581{name}" for name in NAMES[::-1]]},
}


@pytest.mark.parametrize("kind", INSIDE)
def test_sentinels_in_a_model_keep_their_ids_and_the_saved_tokenizer_finds_them(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    model = trained(tmp_path, INSIDE[kind])
    vocabulary, processor = Tokenizer.load(model), sentencepiece.SentencePieceProcessor(model_file=str(model))
    names = [f"\u2581{name}" for name in NAMES] if kind == "mT5" else NAMES
    assert vocabulary.sentinel_ids.tolist() == [processor.piece_to_id(name) for name in names]
    assert vocabulary.size == processor.vocab_size()
    assert set(vocabulary.encode("a <extra_id_3> b")).isdisjoint(vocabulary.sentinel_ids)
    vocabulary.save(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.convert_tokens_to_ids(names) == vocabulary.sentinel_ids.tolist()
    assert vocabulary.sentinel_ids[3] in tokenizer("a <extra_id_3> b").input_ids
    again = Tokenizer.load(tmp_path / "saved")
    assert (again.fingerprint, again.sentinel_ids.tolist()) == (
        vocabulary.fingerprint,
        vocabulary.sentinel_ids.tolist(),
    )


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "none"])
def test_a_t5_folder_with_added_tokens_gives_the_ids_of_autotokenizer(own_model, tmp_path, file):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "t5"
    Tokenizer.load(own_model).save(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    added = tokenizer.add_tokens(["beauty", "thingofbeauty"] if file != "none" else [])
    if file == "tokenizer.json":
        tokenizer.save_pretrained(folder)
    else:
        (folder / "tokenizer.json").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        new = {index: token for index, token in tokenizer.added_tokens_decoder.items() if index >= 400}
        if file == "tokenizer_config.json":
            config["added_tokens_decoder"] = {i: {"content": str(token), "special": False} for i, token in new.items()}
            (folder / file).write_text(json.dumps(config))
        elif file != "none":
            (folder / "added_tokens.json").write_text(json.dumps({str(token): i for i, token in new.items()}))
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    assert added == (2 if file != "none" else 0) and len(oracle) == 400 + added
    for path in (folder, folder / "spiece.model"):
        vocabulary = Tokenizer.load(path)
        text = "The thing of beauty and thingofbeauty."
        assert (
            list(vocabulary.encode(text))
            == oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )
        assert vocabulary.size == len(oracle) and vocabulary.sentinel_ids.tolist() == list(range(399, 299, -1))
    vocabulary.save(tmp_path / "saved")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == oracle.get_vocab()


def test_segmentations_of_equal_score_are_the_same_in_the_saved_tokenizer_and_without_its_end(tmp_path):
    transformers = pytest.importorskip("transformers")
    from lm_experiments_tools.models.tokenizers import without_end

    marks = "*-=.#xo"
    lines = [f"{mark * n} word {mark * (n + 1)}{other * 3}" for n in range(1, 9) for mark in marks for other in marks]
    train_vocab([write_jsonl(tmp_path / "t.jsonl", lines * 3)], 170, tmp_path / "v.model")
    vocabulary = Tokenizer.load(tmp_path / "v.model")
    vocabulary.save(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "v.model"))
    texts = [
        f"{mark * n}{other * k}" for mark in marks for other in marks for n in range(1, 40, 3) for k in (0, 7, 15)
    ]
    expected = processor.encode(texts)
    assert tokenizer(texts, add_special_tokens=False).input_ids == expected
    assert without_end(tokenizer)(texts).input_ids == expected


@pytest.mark.parametrize(("special", "files"), [(False, "all"), (True, "no tokenizer.json")])
@needs_t5_32k
def test_code_in_a_t5_folder_has_the_ids_of_autotokenizer(tmp_path, special, files):
    """A special token is recognized in text only by its own id, as with transformers' split_special_tokens."""
    transformers = pytest.importorskip("transformers")
    Tokenizer.load(T5_32K).save(tmp_path)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    oracle.add_special_tokens({"extra_special_tokens": ["<code>"]}) if special else oracle.add_tokens(["<code>"])
    oracle.save_pretrained(tmp_path)
    if files != "all":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<code>": 32100}))
        oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "Call <code>print(1)</code> or <code> again"
    wanted = oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert list(tokenizer.encode(text)) == wanted and wanted.count(32100) == (0 if special else 2)
    forged = {*tokenizer.sentinel_ids.tolist(), tokenizer.eos_id}
    assert forged.isdisjoint(tokenizer.encode("<extra_id_0> is </s> text"))
    assert tokenizer.find("<code>") == oracle.convert_tokens_to_ids("<code>") == 32100
    assert tokenizer.size == len(oracle) == 32101 and tokenizer.sentinel_ids[0] == 32099
    assert tokenizer.decode([-100, *tokenizer.encode("again"), -100, 32100]).replace(" ", "") == "again<code>"


def test_a_plain_t5_folder_is_read_by_sentencepiece_and_a_stale_model_is_not(own_model, tmp_path):
    Tokenizer.load(own_model).save(tmp_path / "t5")
    assert isinstance(Tokenizer.load(tmp_path / "t5"), SentencePieceTokenizer)
    Tokenizer.load(trained(tmp_path, KINDS["unigram"])).save(tmp_path / "other")
    (tmp_path / "other" / "spiece.model").write_bytes((tmp_path / "t5" / "spiece.model").read_bytes())
    found = Tokenizer.load(tmp_path / "other")
    assert not isinstance(found, SentencePieceTokenizer)
    oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "other")
    assert list(found.encode(HELD_OUT[0])) == oracle(HELD_OUT[0], add_special_tokens=False).input_ids
