"""Tokenizers of Hugging Face and bytes as vocabularies, against AutoTokenizer and ByT5Tokenizer."""

import json
import pickle

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from lm_experiments_tools.data.objectives.mlm import mask_id
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.encoding import TextEncoder
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import check_vocabulary, tokenize_corpus
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import write_jsonl
from tests.helpers.tokenizer_toys import BERT_LIKE, TEXTS, byte_fallback_tokenizer, byte_level_tokenizer
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


@pytest.fixture(scope="module", params=["tokenizer.json", "folder", "gemma", "bytes", "byt5"])
def pair(request, tmp_path_factory):
    """(--vocab, the tokenizer of transformers that it stands for)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "gemma":
        return str(byte_fallback_tokenizer(folder)), AutoTokenizer.from_pretrained(folder)
    if request.param == "bytes":
        return "bytes", ByT5Tokenizer()
    if request.param == "byt5":
        ByT5Tokenizer(extra_ids=7).save_pretrained(folder)
        return str(folder), AutoTokenizer.from_pretrained(folder)
    file = byte_level_tokenizer(folder / "own.json")
    names = dict(zip(("unk_token", "cls_token", "sep_token", "pad_token", "mask_token"), BERT_LIKE, strict=True))
    pretrained = PreTrainedTokenizerFast(tokenizer_file=str(file), **names)
    if request.param == "tokenizer.json":
        return str(file), pretrained
    pretrained.save_pretrained(folder / "saved")
    return str(folder / "saved"), AutoTokenizer.from_pretrained(folder / "saved")


def expected(pretrained, text):
    """Ids of the tokenizer of transformers, which take a special token in the text for ordinary characters."""
    if isinstance(pretrained, ByT5Tokenizer):  # it splits at special tokens whatever one asks for
        return [byte + 3 for byte in text.encode()]
    return pretrained(text, add_special_tokens=False, split_special_tokens=True).input_ids


def test_ids_are_those_of_autotokenizer_whatever_the_number_of_processes(pair, tmp_path):
    vocab, pretrained = pair
    data = write_jsonl(tmp_path / "text.jsonl", TEXTS)
    wanted = [expected(pretrained, text) for text in TEXTS]
    plain = [text.replace("<extra_id_0>", "").replace("[MASK]", "").replace("</s>", "") for text in TEXTS]
    assert [expected(pretrained, text) for text in plain] == [
        pretrained(text, add_special_tokens=False).input_ids for text in plain
    ]
    vocabulary = Vocabulary.load(vocab)
    assert [list(ids) for ids in vocabulary.encode_batch(TEXTS)] == wanted
    assert [list(vocabulary.encode(text)) for text in TEXTS[:3]] == wanted[:3]
    meta = tokenize_corpus([data], vocab, tmp_path / "t", workers=1)
    tokens = IndexedDataset(tmp_path / "t")
    assert [tokens[i].tolist() for i in range(len(tokens))] == wanted
    check_vocabulary(str(tmp_path / "t"), meta, vocabulary)
    with pytest.raises(UserError, match="were made with the vocabulary"):
        check_vocabulary(str(tmp_path / "t"), meta, Vocabulary.load(numbered_words_vocabulary(tmp_path)))


def test_a_folder_with_nothing_but_tokenizer_json_is_that_file(tmp_path):
    pretrained = AutoTokenizer.from_pretrained(byte_fallback_tokenizer(tmp_path / "whole"))
    pretrained.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    of_folder, of_file = Vocabulary.load(tmp_path), Vocabulary.load(tmp_path / "tokenizer.json")
    assert of_folder.identity == of_file.identity
    assert list(of_folder.encode(TEXTS[0])) == expected(pretrained, TEXTS[0])


def test_special_ids_are_the_tokenizers_own(pair):
    vocab, pretrained = pair
    vocabulary = Vocabulary.load(vocab)
    assert vocabulary.size == len(pretrained) and vocabulary.pad_id == pretrained.pad_token_id
    assert vocabulary.eos_id in (pretrained.eos_token_id, pretrained.sep_token_id)
    assert vocabulary.mask_id == pretrained.mask_token_id
    first = next(name for name in ("<extra_id_0>", "<unused0>", "[unused0]") if name in pretrained.get_vocab())
    second = first.replace("0", "1")
    assert vocabulary.sentinel_ids[:2].tolist() == pretrained.convert_tokens_to_ids([first, second])
    ids = [*vocabulary.encode("naïve text"), vocabulary.sentinel_ids[1], vocabulary.eos_id, vocabulary.pad_id]
    assert vocabulary.decode(ids).split() == ["naïve", "text", "<extra_id_1>"]


def test_the_tokenizer_beside_a_checkpoint_is_the_same_vocabulary(pair, tmp_path):
    vocab, pretrained = pair
    vocabulary = Vocabulary.load(vocab)
    numbered_words_vocabulary(tmp_path).rename(tmp_path / "spiece.model")  # of a run before: it must not be taken
    vocabulary.save_tokenizer(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == pretrained.get_vocab() and again.mask_token == pretrained.mask_token
    assert [expected(again, text) for text in TEXTS] == [expected(pretrained, text) for text in TEXTS]
    for other in (Vocabulary.load(tmp_path), pickle.loads(pickle.dumps(vocabulary))):
        assert (other.identity, other.size, other.eos_id) == (vocabulary.identity, vocabulary.size, vocabulary.eos_id)
        assert list(other.encode(TEXTS[1])) == list(vocabulary.encode(TEXTS[1]))


def test_documents_are_encoded_whole_because_newlines_are_kept(pair):
    vocabulary = Vocabulary.load(pair[0])
    ids = TextEncoder.of(vocabulary, append_eos=True).encode([["a\nb"]]).ids
    assert list(ids) == [*vocabulary.encode("a\nb"), vocabulary.eos_id] and "\n" in vocabulary.decode(ids)


def test_a_vocabulary_above_65535_ids_is_written_in_four_bytes(tmp_path):
    words = {name: index for index, name in enumerate(["<unk>", "</s>", *(f"w{i}" for i in range(70_000))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "t.json"))
    meta = tokenize_corpus([write_jsonl(tmp_path / "d.jsonl", ["w69999 w0 w7"])], tmp_path / "t.json", tmp_path / "t")
    assert meta["dtype"] == "int32" and IndexedDataset(tmp_path / "t")[0].tolist() == [70_001, 2, 9]


def test_what_cannot_be_a_vocabulary_is_one_sentence(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    plain = tmp_path / "plain.json"
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(plain))
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CanineTokenizer"}))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "tokenizer_config.json").write_text("[1]")
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1})).save(str(tmp_path / "closed.json"))
    added = ByT5Tokenizer(extra_ids=2)
    added.add_tokens(["word"])
    added.save_pretrained(tmp_path / "added")
    for name, sentence in {
        "broken.json": "cannot be loaded",
        "plain.json": "has no eos_token or sep_token",
        "slow": "CanineTokenizer in Python",
        "config": "holds a JSON list, not an object",
        "t5": "has no tokens but special ones",
        "added": "save it without added tokens",
    }.items():
        with pytest.raises(UserError, match=sentence) as error:
            Vocabulary.load(tmp_path / name)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "BPE"])
def test_text_forges_no_special_token_that_is_a_piece_of_the_model(tmp_path, kind):
    pieces = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{k}>" for k in range(2)), *"</s>a", "\u2581", "\u2581a", "</"]
    pieces = list(dict.fromkeys(pieces))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    model = {
        "Unigram": lambda: models.Unigram([(piece, -float(number)) for piece, number in numbers.items()], 2, False),
        "WordLevel": lambda: models.WordLevel(numbers, unk_token="<unk>"),
        "BPE": lambda: models.BPE(numbers | {"s>": len(numbers)}, merges, unk_token="<unk>"),
    }[kind]()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    pretrained.add_tokens(["word"])
    pretrained.save_pretrained(tmp_path / "saved")
    vocabulary = pickle.loads(pickle.dumps(Vocabulary.load(tmp_path / "saved")))
    special = {0, 1, 3, 4}
    for text in ("</s>", "a </s> a", "a</s>a", "<extra_id_0> a", "<pad>"):
        assert special.isdisjoint(vocabulary.encode(text)) and len(vocabulary.encode(text))
    assert vocabulary.encode("a word a") == pretrained("a word a", add_special_tokens=False).input_ids
    assert vocabulary.find("</s>") == vocabulary.eos_id == 1 and vocabulary.sentinel_ids.tolist() == [3, 4]


def test_masking_needs_a_mask_token_or_a_sentinel(tmp_path):
    with_mask = Vocabulary.load(byte_level_tokenizer(tmp_path / "a.json"))
    assert mask_id(with_mask) == with_mask.mask_id == with_mask.find("[MASK]")
    assert mask_id(Vocabulary.load("bytes")) == 259
    neither = Vocabulary.load(byte_level_tokenizer(tmp_path / "b.json", special=("</s>", "<pad>")))
    with pytest.raises(UserError, match=r"has neither \[MASK\] nor <mask> nor a sentinel"):
        mask_id(neither)


def test_characters_that_a_tokenizer_leaves_out_are_warned_of(tmp_path, caplog):
    for name, unknown in {"open.json": "<unk>", "closed.json": None}.items():
        pieces = {piece: number for number, piece in enumerate(["<unk>", "</s>", "a", "b"])}
        tokenizer = Tokenizer(models.BPE(pieces, [], unk_token=unknown))
        tokenizer.save(str(tmp_path / name))
        ids = Vocabulary.load(tmp_path / name).encode("aébé")
        assert ids == ([2, 3] if unknown is None else [2, 0, 3, 0])
    (warning,) = [record.getMessage() for record in caplog.records if "leaves them out" in record.getMessage()]
    assert "closed.json" in warning
