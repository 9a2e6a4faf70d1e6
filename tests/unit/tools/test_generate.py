"""`lmtools generate` against transformers called directly, for each kind of model."""

import io
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
)

from lm_experiments_tools.data.text.byte_tokenizer import swap_sentinels
from lm_experiments_tools.tools.generate import filled, text_of
from lm_experiments_tools.tools.main import main
from tests.helpers.pretrained_toys import ROWS, save_toy, toy_model, toy_tokenizer

TEXTS = ("w1 w2 w3", "w7", "w4 w9 w2 w8 w30")


def answers(capsys, *words) -> list[dict]:
    capsys.readouterr()  # what saving printed
    assert main(["generate", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def save_bert(folder, cls, **settings):
    config = BertConfig(
        vocab_size=ROWS, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, initializer_range=0.3, **settings,
    )  # fmt: skip
    torch.manual_seed(1)
    model = cls(config).eval()
    model.save_pretrained(folder)
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "w80"})
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize(("kind", "beams"), [("encoder-decoder", 3), ("decoder", 1)])
def test_batches_of_texts_are_answered_as_transformers_answers_each(tmp_path, capsys, kind, beams):
    model = toy_model(kind)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save_toy(kind, tmp_path, model)
    auto = AutoModelForSeq2SeqLM if kind == "encoder-decoder" else AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(tmp_path).eval(), toy_tokenizer()
    found = answers(capsys, tmp_path, *TEXTS, "--max_new_tokens", 6, "--num_beams", beams, "--batch_size", 2)
    assert [entry["text"] for entry in found] == list(TEXTS)
    for text, entry in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        row = model.generate(ids, max_new_tokens=6, num_beams=beams, do_sample=False, pad_token_id=0)[0]
        row = row[ids.shape[1] :] if kind == "decoder" else row
        assert entry == {"text": text, "output": tokenizer.decode(row, skip_special_tokens=True)}
    assert any(entry["output"] for entry in found)


def test_drawing_is_repeatable_and_follows_the_seed(tmp_path, capsys):
    save_toy("decoder", tmp_path)
    flags = (tmp_path, "w1 w2", "--do_sample", "--max_new_tokens", 8, "--seed")
    assert answers(capsys, *flags, 1) == answers(capsys, *flags, 1) != answers(capsys, *flags, 2)


def test_the_likeliest_words_of_each_mask(tmp_path, capsys):
    model, tokenizer = save_bert(tmp_path, BertForMaskedLM)
    texts = ("w1 w80 w3 w80", "w80")
    found = answers(capsys, tmp_path, *texts, "--top", 2)
    for text, entry in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        scores = model(input_ids=ids).logits[0, ids[0] == tokenizer.mask_token_id, : len(tokenizer)].softmax(-1)
        assert len(entry["masks"]) == text.count("w80")
        for words, expected in zip(entry["masks"], scores, strict=True):
            best = expected.topk(2)
            assert [word["word"] for word in words] == [tokenizer.decode([i]) for i in best.indices]
            assert [word["probability"] for word in words] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert main(["generate", str(tmp_path), "w1"]) == 2
    assert "fills in w80, which is not in 'w1'" in capsys.readouterr().err


def test_labels_of_a_classifier(tmp_path, capsys):
    model, tokenizer = save_bert(
        tmp_path, BertForSequenceClassification, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}
    )
    (entry,) = answers(capsys, tmp_path, TEXTS[0])
    scores = model(**tokenizer(TEXTS[0], return_tensors="pt")).logits.softmax(-1)[0]
    assert {label["label"]: label["probability"] for label in entry["labels"]} == pytest.approx(
        {"no": scores[0].item(), "yes": scores[1].item()}, abs=1e-6
    )


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("<extra_id_0> one<extra_id_1> two words<extra_id_2>", "a one b two words."),
        ("<extra_id_1> two <extra_id_0> one <extra_id_0> late", "a one b two."),
        ("said nothing of it", "a <extra_id_0> b <extra_id_1>."),
    ],
)
def test_blanks_are_filled_by_number(output, expected):
    assert filled("a <extra_id_0> b <extra_id_1>.", output) == expected


def test_a_file_and_standard_input(tmp_path, capsys, monkeypatch):
    save_toy("encoder-decoder", tmp_path / "model")
    (tmp_path / "texts").write_text("w1 w2\n\nw3\n")
    expected = answers(capsys, tmp_path / "model", "w1 w2", "w3")
    assert answers(capsys, tmp_path / "model", "--file", tmp_path / "texts") == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw3"))
    assert answers(capsys, tmp_path / "model", "--file", "-") == expected


def test_byt5_reads_and_writes_the_sentinels_that_it_was_trained_with():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    ids = tokenizer("a<extra_id_0>b<extra_id_1><extra_id_20>").input_ids
    assert ids == [100, 259, 101, 260, 279, 1]  # transformers' ids, which no published model knows
    trained = swap_sentinels(tokenizer, ids)
    assert trained == [100, 258, 101, 257, 279, 1]
    assert text_of(tokenizer, trained) == "a<extra_id_0>b<extra_id_1><extra_id_20>"


def test_users_special_tokens_are_text():
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<name>"]})
    ids = tokenizer("w1 <name> w2").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["w1", "w2"]
    assert text_of(tokenizer, [tokenizer.pad_token_id, *ids]).split() == ["w1", "<name>", "w2"]
