"""The BERT tokenizers against transformers' own, on real text, on text made to break them, and on saved files."""

import json
import random
import string

import numpy as np
import pytest
import tokenizers

from lm_experiments_tools.data.text import hf_tokenizer
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.main import main as lmtools
from lm_experiments_tools.tools.train_vocabulary import train_wordpiece
from megatron.tokenizers import build_tokenizer
from tests.helpers.real_data import DATA, lacking

BERT = DATA / "vocabs" / "bert-base-uncased"
CORPUS = DATA / "corpus" / "validation.jsonl"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["word", "##s", "un", "##able", "café", "cafe", "中", "ss", "straße", "strasse", "Word", "mask"]
PIECES = [*SPECIAL, *string.ascii_letters, *(f"##{c}" for c in string.ascii_letters), *string.punctuation, *WORDS]
PIECES = list(dict.fromkeys(PIECES))
# Characters at the edges of what BERT's normalizer tells apart: control, format, white space, accents, case, CJK.
ODD = [
    *map(chr, range(0x180)),
    *"\u0130\u0131\u03a3\u03c2\u0344\u0345\u1e9e\u1100\u1161\uac00\u0958\ufb01\u4e2d\u65e5",
]
ODD += [
    *"\u0300\u0301\u0327\u0338\u200b\u200d\u2028\u2029\u2060\u3000\ufeff\ufffd\u0085\U0001f600\U0001d400\U00020000"
]


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    return path


@pytest.fixture
def uncased(vocab_file):
    return build_tokenizer("BertWordPieceLowerCase", vocab_file=vocab_file)


def transformers_ids(pieces, lowercase, texts):
    from transformers import BertTokenizer

    reference = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, do_lower_case=lowercase)
    return reference(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def odd_texts(count, seed=0):
    rng = random.Random(seed)
    common = [" ", "\n", "\t", "\r", *string.ascii_letters, *string.punctuation, *string.digits, " word", "unable"]
    alphabet = ODD + common * 3
    return ["".join(rng.choices(alphabet, k=rng.randrange(30))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_ids_equal_those_of_transformers_on_text_made_to_break_them(vocab_file, kind):
    texts = [*odd_texts(1000), "", " ", "[MASK] word[SEP]", "x" * 101, "ab." * 40, "e\u0301 caf\u00e9s"]
    tokenizer = build_tokenizer(kind, vocab_file=vocab_file)
    expected = transformers_ids(PIECES, kind.endswith("LowerCase"), texts)
    assert tokenizer.encode_batch(texts) == expected
    assert [tokenizer.encode(text) for text in texts[-6:]] == expected[-6:]
    assert any(len(ids) > 20 for ids in expected)


def test_real_text_with_googles_vocabulary_equals_transformers():
    if reason := lacking(BERT, CORPUS):
        pytest.skip(reason)
    with open(CORPUS, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(4), strict=False)]
    texts = [line for text in texts for line in text.split("\n")][:150]
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=BERT)
    pieces = (BERT / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert tokenizer.encode_batch(texts) == transformers_ids(pieces, True, texts)
    assert tokenizer.control_ids.tolist() == [0, 100, 101, 102, 103]  # [unused0] and so on are drawn as random tokens
    assert tokenizer.size == 30522 and (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        *(0, 101, 102),
        103,
    )
    loaded = build_tokenizer("HFTokenizer", name_or_path=BERT)
    assert loaded.fingerprint == tokenizer.fingerprint  # the same tokenizer by another way


def test_the_ids_are_the_same_when_the_table_of_words_is_full(uncased, monkeypatch):
    texts = odd_texts(300, seed=1)
    expected = uncased.encode_batch(texts)
    for limit in ("MAX_WORDS", "MAX_CHARACTERS"):
        monkeypatch.setattr(hf_tokenizer._WordTable, limit, 20)
        assert [uncased.encode(text) for text in texts] == expected


def test_special_ids_word_starts_and_decoding(uncased):
    assert [uncased.pad_id, uncased.cls_id, uncased.sep_id, uncased.mask_id] == [
        0,
        2,
        3,
        4,
    ] and uncased.eos_id == uncased.sep_id
    assert uncased.special_ids.tolist() == [0, 1, 2, 3, 4] and uncased.size == len(PIECES)
    assert uncased.starts_word.dtype == bool
    assert uncased.starts_word.tolist() == [not piece.startswith("##") for piece in PIECES]
    assert uncased.decode([2, *uncased.encode("Unable words"), 4, -100]) == "[CLS] unable words [MASK]"


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_saved_files_give_the_same_tokenizer_to_us_and_to_autotokenizer(vocab_file, tmp_path, kind):
    from transformers import AutoTokenizer

    tokenizer = build_tokenizer(kind, vocab_file=vocab_file)
    tokenizer.save(tmp_path / "saved")
    texts = odd_texts(50, seed=2)
    loaded = build_tokenizer("HFTokenizer", name_or_path=tmp_path / "saved")
    loaded.save(tmp_path / "again")
    from_vocab_txt = build_tokenizer(kind, vocab_file=tmp_path / "saved")
    again = build_tokenizer("HFTokenizer", name_or_path=tmp_path / "again")
    for other in (loaded, from_vocab_txt, again):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.encode_batch(texts) == tokenizer.encode_batch(texts)
    automatic = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert automatic("Unable words").input_ids == [2, *tokenizer.encode("Unable words"), 3]


def test_fingerprint_names_pieces_their_order_and_the_case(vocab_file, tmp_path):
    swapped = [*PIECES[:-2], PIECES[-1], PIECES[-2]]
    (tmp_path / "vocab.txt").write_text("\n".join(swapped), encoding="utf-8")
    prints = {
        build_tokenizer("BertWordPieceLowerCase", vocab_file=vocab_file).fingerprint,
        build_tokenizer("BertWordPieceCase", vocab_file=vocab_file).fingerprint,
        build_tokenizer("BertWordPieceLowerCase", vocab_file=tmp_path).fingerprint,
    }
    assert len(prints) == 3


def hugging_face_folder(folder, backend, **special):
    """A folder as a tokenizer of another family would be saved."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


ROLES = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "pad_token": "<pad>"}


def byte_level(tokens=("<s>", "</s>", "<mask>", "<pad>")):
    vocab = {token: index for index, token in enumerate([*tokens, "a", "b", "c", "\u0120", "ab", "\u0120a"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("\u0120", "a")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(tokens))
    return backend


def sentencepiece_like():
    pieces = [*ROLES.values(), "<unk>", "\u2581a", "b", "\u2581"]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, -1.0) for piece in pieces], unk_id=4))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.add_special_tokens(list(ROLES.values()))
    return backend


def test_other_families_mark_word_starts_in_their_own_way(tmp_path):
    folder = hugging_face_folder(tmp_path / "bpe", byte_level(), **ROLES, eos_token="</s>")
    tokenizer = build_tokenizer("HFTokenizer", name_or_path=folder)
    assert tokenizer.encode_batch(["ab ac", "<s>"])[0] == [8, 9, 6]
    assert tokenizer.eos_id == tokenizer.sep_id == 1 and 0 not in tokenizer.encode("<s>a")
    #                                        <s>   </s>  mask  pad   a      b      c      G     ab     Ga
    assert tokenizer.starts_word.tolist() == [True, True, True, True, False, False, False, True, False, True]
    folder = hugging_face_folder(tmp_path / "unigram", sentencepiece_like(), **ROLES)
    tokenizer = build_tokenizer("HFTokenizer", name_or_path=folder)
    assert tokenizer.encode("ab a") == [5, 6, 5]
    assert tokenizer.starts_word.tolist() == [True] * 4 + [False, True, False, True]


def test_added_words_that_look_across_spaces_are_found(vocab_file, tmp_path):
    build_tokenizer("BertWordPieceLowerCase", vocab_file=vocab_file).save(tmp_path / "saved")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    backend.add_tokens(["word un"])
    roles = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], SPECIAL, strict=True))
    tokenizer = build_tokenizer("HFTokenizer", name_or_path=hugging_face_folder(tmp_path / "added", backend, **roles))
    assert tokenizer.encode("a word un") == [PIECES.index("a"), len(PIECES)]
    assert tokenizer.size == len(PIECES) + 1 == len(tokenizer.starts_word)


def test_what_cannot_be_a_bert_tokenizer_is_one_sentence(vocab_file, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"[PAD]\n\xff\n")
    (tmp_path / "other.txt").write_text("<pad>\n[SEP]\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": 1')
    (tmp_path / "broken" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "folder").mkdir()
    no_mask = {name: token for name, token in ROLES.items() if name != "mask_token"}
    hugging_face_folder(tmp_path / "gpt", byte_level(), **no_mask)
    wordpiece, hugging_face = "BertWordPieceCase", "HFTokenizer"
    for kind, arguments, message in [
        (wordpiece, {}, "needs --vocab-file"),
        (wordpiece, {"vocab_file": tmp_path / "none.txt"}, "none.txt does not exist"),
        (wordpiece, {"vocab_file": tmp_path / "binary.txt"}, "not UTF-8 text .byte 6."),
        (
            wordpiece,
            {"vocab_file": tmp_path / "other.txt"},
            r"other.txt is no WordPiece .* no line .UNK. and no .CLS. and no .PAD. and no .MASK.",
        ),
        (hugging_face, {}, "needs --tokenizer-name-or-path"),
        (hugging_face, {"name_or_path": tmp_path / "none"}, "none does not exist"),
        (hugging_face, {"name_or_path": tmp_path / "folder"}, "folder has no tokenizer_config.json"),
        (hugging_face, {"name_or_path": tmp_path / "other.txt"}, "other.txt is no WordPiece vocabulary"),
        (hugging_face, {"name_or_path": tmp_path / "broken"}, "broken cannot be loaded .[A-Za-z]+.: "),
        (hugging_face, {"name_or_path": tmp_path / "gpt"}, "gpt has no mask_token"),
        ("GPT2BPETokenizer", {}, "is none of HFTokenizer"),
        ("Bert", {}, "Bert is none of HFTokenizer, BertWordPieceLowerCase"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            build_tokenizer(kind, **arguments)
        assert "\n" not in str(caught.value)


def test_a_wordpiece_vocabulary_is_trained_and_is_the_same_every_time(tmp_path, capsys):
    rng = random.Random(0)
    names = sorted({name for name in dir(np) if name.isascii()})
    text = [" ".join(rng.choices(names, k=30)) + " \u00c9t\u00e9 Word." for _ in range(200)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
    command = ["vocab", "--type", "wordpiece", "--input", str(tmp_path), "--size", "400"]
    assert lmtools([*command, "--output", str(tmp_path / "cased" / "vocab.txt"), "--lowercase", "false"]) == 0
    assert "400 ids" in capsys.readouterr().out
    lower = train_wordpiece([str(tmp_path / "data.jsonl")], 400, tmp_path / "vocab.txt")
    again = train_wordpiece([str(tmp_path / "data.jsonl")], 400, tmp_path / "again.txt")
    assert lower.fingerprint == again.fingerprint and lower.size == 400
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=lower.path)
    assert tokenizer.size == 400 and tokenizer.special_ids.tolist() == [0, 1, 2, 3, 4]
    assert tokenizer.decode(tokenizer.encode(text[0])).replace(" ", "") == text[0].replace(
        "\u00c9t\u00e9", "ete"
    ).lower().replace(" ", "")
    cased = build_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "cased")
    assert 1 not in cased.encode("\u00c9t\u00e9 Word.") and "[UNK]" not in cased.decode(cased.encode(text[1]))
    with pytest.raises(UserError, match=r"give --size at most (\d+)") as error:
        train_wordpiece([str(tmp_path / "data.jsonl")], 10**6, tmp_path / "none.txt")
    largest = int(str(error.value).split()[-1])
    assert train_wordpiece([str(tmp_path / "data.jsonl")], largest, tmp_path / "largest.txt").size == largest > 400
    assert lmtools([*command, "--output", "x", "--type", "sentencepiece", "--lowercase", "false"]) == 2
