"""Tokenizers of Hugging Face and bytes as vocabularies, against AutoTokenizer and ByT5Tokenizer."""

import json
import pickle
import subprocess
import sys

import pytest
import tokenizers
from huggingface_hub import constants
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizerFast, ByT5Tokenizer, PreTrainedTokenizerFast

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import TextEncoder, check_vocabulary, open_tokenizer, tokenize_corpus
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.tokenizers import named_tokenizer
from megatron.tokenizers import build_tokenizer
from tests.helpers.real_data import DATA, lacking
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
    vocabulary = Tokenizer.load(vocab)
    assert [list(ids) for ids in vocabulary.encode_batch(TEXTS)] == wanted
    assert [list(vocabulary.encode(text)) for text in TEXTS[:3]] == wanted[:3]
    tokenize_corpus([data], vocab, tmp_path / "t", workers=1)
    tokens = IndexedDataset(tmp_path / "t")
    assert [tokens[i].tolist() for i in range(len(tokens))] == wanted
    check_vocabulary(IndexedDataset(tmp_path / "t"), vocabulary)
    with pytest.raises(UserError, match="were made with the vocabulary"):
        check_vocabulary(IndexedDataset(tmp_path / "t"), Tokenizer.load(numbered_words_vocabulary(tmp_path)))


def test_a_folder_with_nothing_but_tokenizer_json_is_that_file(tmp_path):
    pretrained = AutoTokenizer.from_pretrained(byte_fallback_tokenizer(tmp_path / "whole"))
    pretrained.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    of_folder, of_file = Tokenizer.load(tmp_path), Tokenizer.load(tmp_path / "tokenizer.json")
    assert of_folder.fingerprint == of_file.fingerprint
    assert list(of_folder.encode(TEXTS[0])) == expected(pretrained, TEXTS[0])


def test_special_ids_are_the_tokenizers_own(pair):
    vocab, pretrained = pair
    vocabulary = Tokenizer.load(vocab)
    assert vocabulary.size == len(pretrained) and vocabulary.pad_id == pretrained.pad_token_id
    assert vocabulary.eos_id in (pretrained.eos_token_id, pretrained.sep_token_id)
    assert vocabulary.mask_id == pretrained.mask_token_id
    if not isinstance(pretrained, ByT5Tokenizer):
        first = next(name for name in ("<extra_id_0>", "<unused0>", "[unused0]") if name in pretrained.get_vocab())
        second = first.replace("0", "1")
        assert vocabulary.sentinel_ids[:2].tolist() == pretrained.convert_tokens_to_ids([first, second])
    ids = [*vocabulary.encode("naïve text"), vocabulary.sentinel_ids[1], vocabulary.eos_id, vocabulary.pad_id]
    assert vocabulary.decode(ids).split() == ["naïve", "text", "<extra_id_1>"]


def test_the_tokenizer_beside_a_checkpoint_is_the_same_vocabulary(pair, tmp_path):
    vocab, pretrained = pair
    vocabulary = Tokenizer.load(vocab)
    numbered_words_vocabulary(tmp_path).rename(tmp_path / "spiece.model")  # of a run before: it must not be taken
    vocabulary.save(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == pretrained.get_vocab() and again.mask_token == pretrained.mask_token
    assert [expected(again, text) for text in TEXTS] == [expected(pretrained, text) for text in TEXTS]
    for other in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(vocabulary))):
        assert (other.fingerprint, other.size, other.eos_id) == (
            vocabulary.fingerprint,
            vocabulary.size,
            vocabulary.eos_id,
        )
        assert list(other.encode(TEXTS[1])) == list(vocabulary.encode(TEXTS[1]))


def test_documents_are_encoded_whole_because_newlines_are_kept(pair):
    vocabulary = Tokenizer.load(pair[0])
    ids = TextEncoder(vocabulary, append_eos=True).encode([["a\nb"]]).ids
    assert list(ids) == [*vocabulary.encode("a\nb"), vocabulary.eos_id] and "\n" in vocabulary.decode(ids)


def test_a_vocabulary_above_65535_ids_is_written_in_four_bytes(tmp_path):
    words = {name: index for index, name in enumerate(["<unk>", "</s>", *(f"w{i}" for i in range(70_000))])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "t.json"))
    data = write_jsonl(tmp_path / "d.jsonl", ["w69999 w0 w7"])
    meta = tokenize_corpus([data], tmp_path / "t.json", tmp_path / "t", workers=1)
    assert meta["dtype"] == "int32" and IndexedDataset(tmp_path / "t")[0].tolist() == [70_001, 2, 9]


def test_what_cannot_be_a_vocabulary_is_one_sentence(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    plain = tmp_path / "plain.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(plain))
    added = ByT5Tokenizer(extra_ids=2)
    added.add_tokens(["word"])
    added.save_pretrained(tmp_path / "added")
    for name, sentence in {
        "broken.json": "cannot be loaded",
        "plain.json": "has no eos_token or sep_token",
        "added": "save it without added tokens",
    }.items():
        with pytest.raises(UserError, match=sentence) as error:
            Tokenizer.load(tmp_path / name)
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
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    pretrained.add_tokens(["word"])
    pretrained.save_pretrained(tmp_path / "saved")
    vocabulary = pickle.loads(pickle.dumps(Tokenizer.load(tmp_path / "saved")))
    special = {0, 1, 3, 4}
    for text in ("</s>", "a </s> a", "a</s>a", "<extra_id_0> a", "<pad>"):
        assert special.isdisjoint(vocabulary.encode(text)) and len(vocabulary.encode(text))
    assert vocabulary.encode("a word a") == pretrained("a word a", add_special_tokens=False).input_ids
    assert vocabulary.find("</s>") == vocabulary.eos_id == 1 and vocabulary.sentinel_ids.tolist() == [3, 4]


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_special_tokens_of_bytes_still_encode_unknown_characters(kind, tmp_path):
    if kind == "BPE":
        byte_fallback_tokenizer(tmp_path)
    else:
        in_bytes = [f"<0x{i:02X}>" for i in range(256)]
        pieces = [(piece, -float(i)) for i, piece in enumerate(["<unk>", "</s>", "a", *in_bytes])]
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, 0, True))
        tokenizer.add_special_tokens(in_bytes)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    oracle, text = AutoTokenizer.from_pretrained(tmp_path), "\u4f60a\u597d Q~ \U00013080"
    wanted = expected(oracle, text)
    assert Tokenizer.load(tmp_path).encode(text) == wanted and len(wanted) > len(text)


def test_characters_that_a_tokenizer_leaves_out_are_warned_of(tmp_path, caplog):
    for name, unknown in {"open.json": "<unk>", "closed.json": None}.items():
        pieces = {piece: number for number, piece in enumerate(["<unk>", "</s>", "a", "b"])}
        tokenizer = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token=unknown))
        tokenizer.save(str(tmp_path / name))
        ids = Tokenizer.load(tmp_path / name).encode("aébé")
        assert ids == ([2, 3] if unknown is None else [2, 0, 3, 0])
    (warning,) = [record.getMessage() for record in caplog.records if "leaves them out" in record.getMessage()]
    assert "closed.json" in warning


def test_the_sentinels_of_bytes_are_those_of_the_published_byt5():
    """258, 257, ...: seqio's ByteVocabulary of 259 ids gives them to t5, transformers' page of ByT5 names them."""
    for vocabulary in (Tokenizer.load("bytes"), pickle.loads(pickle.dumps(Tokenizer.load("bytes")))):
        assert vocabulary.sentinel_ids[:11].tolist() == [259 - 1 - k for k in range(11)]
        names = [f"<extra_id_{k}>" for k in range(11, 125)]
        assert vocabulary.sentinel_ids[11:].tolist() == ByT5Tokenizer().convert_tokens_to_ids(names)
        assert vocabulary.decode([258, *vocabulary.encode("\u00e9"), 257]) == "<extra_id_0>\u00e9 <extra_id_1>"
        assert not vocabulary.token_bytes[vocabulary.sentinel_ids].any()
    largest = max(byte for code in (0x7F, 0x7FF, 0xFFFF, 0x3FFFF, 0x10FFFF) for byte in chr(code).encode())
    assert largest + 3 < vocabulary.sentinel_ids[:11].min()  # no text holds them


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each kind without tokenizer_config.json, and the `tokenizers` object that it stands for."""
    root = tmp_path_factory.mktemp("folders")
    wordpiece, byte_level = BertWordPieceTokenizer(), ByteLevelBPETokenizer()
    wordpiece.train_from_iterator(TEXTS, vocab_size=300)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<extra_id_0>", "<extra_id_1>"]
    byte_level.train_from_iterator(TEXTS, vocab_size=400, special_tokens=special)
    for name in ("vocab.txt", "tokenizer.json", "named.json"):
        (root / name).mkdir()
    wordpiece.save_model(str(root / "vocab.txt"))
    wordpiece.save(str(root / "tokenizer.json" / "tokenizer.json"))
    byte_level.enable_truncation(5)
    byte_level.save(str(root / "named.json" / "own.json"))
    byte_level.no_truncation()
    return {
        root / "vocab.txt": wordpiece,
        root / "vocab.txt" / "vocab.txt": wordpiece,
        root / "tokenizer.json": wordpiece,
        root / "named.json" / "own.json": byte_level,
    }


def test_tokenizers_without_a_config_are_read_alike_by_t5_bert_and_fine_tuning(folders, tmp_path):
    for number, (path, oracle) in enumerate(folders.items()):
        plain = [text.replace("<extra_id_0>", "").replace("[MASK]", "").replace("</s>", "") for text in TEXTS]
        wanted = [found.ids for found in oracle.encode_batch(plain, add_special_tokens=False)]
        vocabulary = Tokenizer.load(path)
        bert = build_tokenizer("HFTokenizer", name_or_path=path)
        tuned = named_tokenizer(str(path), "--tokenizer")
        assert vocabulary.encode_batch(plain) == bert.encode_batch(plain) == wanted
        assert tuned(plain, add_special_tokens=False).input_ids == wanted
        roles = (
            ("[PAD]", "[SEP]", "[MASK]") if isinstance(oracle, BertWordPieceTokenizer) else ("<pad>", "</s>", "<mask>")
        )
        ids = [oracle.token_to_id(name) for name in roles]
        assert (
            [vocabulary.pad_id, vocabulary.eos_id, vocabulary.mask_id]
            == [bert.pad_id, bert.sep_id, bert.mask_id]
            == ids
        )
        vocabulary.save(tmp_path / f"t5-{number}")
        bert.save(tmp_path / f"bert-{number}")
        for saved in ("t5", "bert"):
            again = AutoTokenizer.from_pretrained(tmp_path / f"{saved}-{number}")
            assert again(plain, add_special_tokens=False).input_ids == wanted
            assert again.convert_tokens_to_ids(list(roles)) == ids


def test_a_vocab_txt_with_capital_letters_is_read_as_cased(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Word", "word"]))
    assert Tokenizer.load(tmp_path).encode("Word word") == [5, 6]
    for kind in ("distilbert", "electra", "bert"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert Tokenizer.load(tmp_path).encode("Word word") == [5, 6]  # AutoTokenizer: [6, 6]
    assert named_tokenizer(str(tmp_path), "--tokenizer")("Word").input_ids == [2, 5, 3]


@pytest.mark.parametrize("names", [("vocab.txt", "added_tokens.json"), ("vocab.json", "merges.txt")])
def test_a_folder_that_does_not_tell_the_kind_of_tokenizer_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("{}")
    for load in (Tokenizer.load, lambda path: named_tokenizer(str(path), "--tokenizer")):
        with pytest.raises(UserError, match=r"has no tokenizer_config\.json.*name its \.model file, vocab\.txt or"):
            load(tmp_path)


@pytest.fixture(params=["toy", "bert-base-uncased"])
def vocab_txt(request, tmp_path):
    if request.param == "bert-base-uncased":
        if reason := lacking(real := DATA / "vocabs" / "bert-base-uncased" / "vocab.txt"):
            pytest.skip(reason)
        return real, real.read_text(encoding="utf-8").splitlines()
    pieces = [*"abcdenstuvx", *(f"##{c}" for c in "abcdeinorstuvwx"), "the", "Th", "[unused0]", "[unused1]", "</s>"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    return tmp_path / "vocab.txt", pieces


def same_tokenizer(file, oracle, lowercase=None):
    """Compare the tokenizer of a file, which is read without transformers, with one of transformers."""
    script = (
        "import pickle, sys; from lm_experiments_tools.data.text.tokenizer import Tokenizer; "
        f"found = Tokenizer.load({str(file)!r}, lowercase={lowercase}); assert 'transformers' not in sys.modules; "
        "sys.stdout.buffer.write(pickle.dumps(found))"
    )
    found = pickle.loads(subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE).stdout)
    wanted = Tokenizer.of(oracle, file)
    assert (found.fingerprint, found.pieces, found.roles) == (wanted.fingerprint, oracle.get_vocab(), wanted.roles)
    assert found.sentinel_ids.tolist() == wanted.sentinel_ids.tolist()
    assert found.control_ids.tolist() == wanted.control_ids.tolist()
    assert found.encode_batch(TEXTS) == [expected(oracle, text) for text in TEXTS]


@pytest.mark.parametrize("lowercase", [True, False, None])
def test_a_vocab_txt_is_read_without_transformers_as_by_it(vocab_txt, lowercase):
    file, pieces = vocab_txt
    uncased = "Th" not in pieces if lowercase is None else lowercase
    vocab = {piece: index for index, piece in enumerate(pieces)}
    same_tokenizer(file, BertTokenizerFast(vocab=vocab, do_lower_case=uncased), lowercase)


@pytest.mark.parametrize("kind", ["BERT's roles", "other special tokens", "none is special"])
def test_a_tokenizer_json_is_read_without_transformers_as_by_it(tmp_path, kind):
    file, names = tmp_path / "t.json", ("<s>", "</s>", "<unk>", "<extra>", "<other>")
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if kind == "BERT's roles":
        byte_level_tokenizer(file)
        roles = dict(zip(("unk_token", "cls_token", "sep_token", "pad_token", "mask_token"), BERT_LIKE, strict=True))
        roles["extra_special_tokens"] = ["[unused0]", "[unused1]"]
    elif kind == "other special tokens":
        byte_level_tokenizer(file, names)
        roles["extra_special_tokens"] = ["<extra>", "<other>"]
    else:
        pieces = {name: index for index, name in enumerate([*names, "The", "x"])}
        tokenizers.Tokenizer(models.WordLevel(pieces, unk_token="<unk>")).save(str(file))
    same_tokenizer(file, PreTrainedTokenizerFast(tokenizer_file=str(file), **roles))


def test_names_in_brackets_make_no_vocabulary_cased(tmp_path):
    """Multilingual BERT's has <S> and <T>, whether it is cased or not."""
    pieces = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<S>", "<T>", "word"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    wanted = BertTokenizerFast.from_pretrained(tmp_path, do_lower_case=True)("Word", add_special_tokens=False)
    assert wanted.input_ids == [8] == Tokenizer.load(tmp_path).encode("Word")


def test_a_vocab_txt_of_another_family_is_read_by_its_config(tmp_path):
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "word", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    with pytest.raises(UserError, match=r"no line \[CLS\] and no \[SEP\]"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet", "vocab_size": len(pieces)}))
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    tuned = named_tokenizer(str(tmp_path), "--tokenizer")
    assert tuned("Word").input_ids == oracle("Word").input_ids == [0, 5, 2]
    assert len(tuned) == len(oracle) == Tokenizer.load(tmp_path).size == len(pieces)


def test_a_name_on_the_hub_is_the_tokenizer_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, save in {
        "gemma": byte_fallback_tokenizer,
        "t5": Tokenizer.load(numbered_words_vocabulary(tmp_path)).save,
    }.items():
        folder = tmp_path / f"models--someone--{name}" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text("abc")
        save(folder)
        found = open_tokenizer(f"someone/{name}")
        assert found.fingerprint == Tokenizer.load(folder).fingerprint == open_tokenizer(found.recorded_as).fingerprint
