"""Tokenizers that mark languages: labels, first tokens and generation are those of transformers."""

import importlib
import json

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
)

from lm_experiments_tools import FineTuner
from lm_experiments_tools.errors import UserError
from tests.helpers.pretrained_toys import save_toy

PAIRS = [("the house is small", "das haus ist klein"), ("we are here", "wir sind hier"), ("good night", "gute nacht")]
ROWS = [{"source": source, "target": target} for source, target in PAIRS]
WORDS = [f"▁{word}" for pair in PAIRS for text in pair for word in text.split()]
MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
CODES = {
    "mbart": ("en_XX", "de_DE"),
    "mbart50": ("en_XX", "de_DE"),
    "nllb": ("eng_Latn", "deu_Latn"),
    "m2m": ("en", "de"),
}


def tokenizer_of(family, folder):
    if family in ("mbart", "mbart50"):
        scores = [(token, 0.0) for token in MARKS] + [(word, -1.0) for word in WORDS]
        return {"mbart": MBartTokenizer, "mbart50": MBart50Tokenizer}[family](vocab=scores)
    if family == "nllb":
        letters = sorted({letter for word in WORDS for letter in word})
        return NllbTokenizer(vocab={token: number for number, token in enumerate([*MARKS, *letters])})
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = iter([text for pair in PAIRS for text in pair])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_prefix=str(folder / "words"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "words.model"))
    names = [*MARKS, *(pieces.id_to_piece(number) for number in range(3, len(pieces)))]
    (folder / "words.json").write_text(json.dumps({token: number for number, token in enumerate(names)}))
    return M2M100Tokenizer(str(folder / "words.json"), str(folder / "words.model"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    sizes = dict(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    folders = {}
    for family in CODES:
        folder = folders[family] = tmp_path_factory.mktemp(family)
        tokenizer = tokenizer_of(family, folder)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        is_mbart = family.startswith("mbart")
        config = (MBartConfig if is_mbart else M2M100Config)(vocab_size=len(tokenizer) + 200, **sizes)
        (MBartForConditionalGeneration if is_mbart else M2M100ForConditionalGeneration)(config).save_pretrained(folder)
    return folders


def tuner_of(folder, source, target, **changes):
    settings = dict(data_path=ROWS * 4, valid_data_path=ROWS, input_seq_len=24, target_seq_len=24, batch_size=4)
    settings |= dict(
        lr=3e-3, iters=200, valid_interval=200, log_interval=200, seed=1, metrics=("exact_match", "chrf"), speed="off"
    )
    return FineTuner(folder, source_lang=source, target_lang=target, **settings | changes)


@pytest.mark.parametrize("family", CODES)
def test_labels_and_first_tokens_are_transformers(family, bases, tmp_path):
    source, target = CODES[family]
    tuner = tuner_of(bases[family], source, target)
    plain = AutoTokenizer.from_pretrained(bases[family], src_lang=source, tgt_lang=target)
    batch = next(iter(tuner.data.train))
    for row in range(4):
        text = PAIRS[int(batch["example"][row]) % len(PAIRS)]
        labels = [number for number in batch["labels"][row].tolist() if number != -100]
        assert labels == plain(text_target=text[1])["input_ids"]
        ids = batch["input_ids"][row][batch["attention_mask"][row] > 0].tolist()
        assert ids == plain(text[0])["input_ids"]

    # the function by which transformers' own forward makes decoder inputs of labels
    shift = importlib.import_module(type(tuner.model).__module__).shift_tokens_right
    starts = [tuner.model.config.pad_token_id] + ([2] if family in ("nllb", "m2m") else [])
    labels = torch.tensor([plain(text_target=PAIRS[0][1])["input_ids"]])
    expected = shift(labels, *starts)[0].tolist()
    begun = tuner.model.generate(torch.tensor([plain("we")["input_ids"]]), max_new_tokens=2)[0].tolist()
    code = plain.convert_tokens_to_ids(f"__{target}__" if family == "m2m" else target)
    marked = 1 if family == "mbart" else 2
    assert begun[:marked] == expected[:marked] and begun[marked - 1] == code

    tuner.save(tmp_path / "saved")
    begun_there = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").generate(
        torch.tensor([plain("we")["input_ids"]]), max_new_tokens=2
    )
    assert begun_there[0].tolist() == begun
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(text_target=PAIRS[0][1])["input_ids"] == labels[0].tolist()


@pytest.mark.parametrize("family", ["mbart"])
def test_a_translator_that_knows_its_data_by_heart_is_right_throughout(family, bases):
    tuner = tuner_of(bases[family], *CODES[family])
    assert tuner.train()["valid"].items() >= {"exact_match": 100.0, "chrf": 100.0}.items()
    assert tuner.predict([pair[0] for pair in PAIRS]) == [pair[1] for pair in PAIRS]


def test_languages_that_are_missing_or_unknown_are_refused(bases, tmp_path):
    with pytest.raises(UserError, match=r"marks the language of targets, and none is set: give --target_lang"):
        tuner_of(bases["nllb"], None, None)
    with pytest.raises(UserError, match=r"--target_lang de_DF is no language of .*; did you mean 'de_DE'"):
        tuner_of(bases["mbart50"], None, "de_DF")
    with pytest.raises(UserError, match=r"the tokenizer marks no languages: leave --target_lang de out"):
        tuner_of(save_toy("encoder-decoder", tmp_path / "t5"), None, "de")
    with pytest.raises(UserError, match=r"target_lang.* comes too late"):
        tuner_of(bases["mbart"], *CODES["mbart"]).train(target_lang="fr_XX")
