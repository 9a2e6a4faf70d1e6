"""Classifiers from Python: probabilities, arguments that do not fit, tables, decoders as encoders, LoRA's layers."""

import peft
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)

from lm_experiments_tools import FineTuner
from lm_experiments_tools.data.text.records import RejectedRecords
from lm_experiments_tools.data.text.records import rows as read_rows
from lm_experiments_tools.errors import UserError
from tests.helpers.pretrained_toys import ROWS as VOCABULARY
from tests.helpers.pretrained_toys import save_toy, toy_tokenizer

TEXTS = ["w1 w2 w3", "w4", "w5 w6"]
ROWS = [{"sentence": text, "label": name} for text, name in zip(TEXTS, ("bad", "good", "bad"), strict=True)]
SETTINGS = {"task": "classification", "input_seq_len": 16, "speed": "off"}


def logits_of(folder):
    """By transformers, a text at a time."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])


@pytest.mark.parametrize("task", ["classification", "multi_label"])
def test_probabilities_are_those_of_transformers(task, tmp_path):
    tuner = FineTuner(save_toy("encoder", tmp_path / "base"), **SETTINGS | {"task": task}, label_names=("bad", "good"))
    tuner.save(tmp_path / "saved")
    logits = logits_of(tmp_path / "saved")
    expected = logits.softmax(-1) if task == "classification" else logits.sigmoid()
    found = tuner.predict(TEXTS, batch_size=2, return_probabilities=True)
    assert [list(row) for row in found] == [["bad", "good"]] * 3
    torch.testing.assert_close(torch.tensor([list(row.values()) for row in found]), expected)
    best = [max(row, key=row.get) for row in found]
    assert task == "multi_label" or tuner.predict(TEXTS) == best


def test_arguments_that_do_not_fit_the_model_are_refused(tmp_path):
    encoder = FineTuner(save_toy("encoder", tmp_path / "bert"), **SETTINGS, label_names=("bad", "good"))
    for call in (encoder.predict, encoder.generate_diverse):
        with pytest.raises(UserError, match=r"an encoder generates no text: leave .*num_beams.* out"):
            call("w1", num_beams=2)
    assert encoder.generate_single("w1") in ("bad", "good")
    with pytest.raises(UserError, match=r"not a table: give one of its columns"):
        encoder.predict(pytest.importorskip("pandas").DataFrame(ROWS))
    writer = FineTuner(save_toy("encoder-decoder", tmp_path / "t5"), input_seq_len=16, target_seq_len=8, speed="off")
    with pytest.raises(UserError, match="return_probabilities is for encoders that classify, and this is --task text"):
        writer.predict("w1", return_probabilities=True)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_is_read_as_its_rows(library, tmp_path):
    module = pytest.importorskip(library)
    rows = [*ROWS, {"sentence": "w7", "label": "good"}]
    table = module.Table.from_pylist(rows) if library == "pyarrow" else module.DataFrame(rows)
    folder = save_toy("encoder", tmp_path / "bert")
    batches = []
    for data in (rows, table, {"train": table, "valid": table}):
        tuner = FineTuner(folder, **SETTINGS, data_path=data, batch_size=4)
        assert tuner.label_names == ("bad", "good")
        batches.append(next(iter(tuner.data.train)))
    assert all((batch[name] == batches[0][name]).all() for batch in batches for name in batch)
    if library == "pandas":
        assert tuner.predict(table["sentence"]) == tuner.predict([row["sentence"] for row in rows])
        source = FineTuner(folder, **SETTINGS, data_path=ROWS, valid_data_path=table[:1]).args.valid_data_path
        assert [row.value for row in read_rows(source, RejectedRecords(0))] == ROWS[:1]


def test_a_decoder_classifies_by_a_class_that_does(tmp_path):
    folder = save_toy("decoder", tmp_path / "gpt")
    with pytest.raises(UserError, match="encoder does not fit weights of kind decoder"):
        FineTuner(folder, **SETTINGS, model_type="encoder", data_path=ROWS)
    model_cls = "transformers:GPT2ForSequenceClassification"
    settings = SETTINGS | {"model_type": "encoder", "model_cls": model_cls}
    tuner = FineTuner(folder, **settings, data_path=ROWS, valid_data_path=ROWS, batch_size=3, iters=40, lr=1e-2)
    assert tuner.train()["valid"]["accuracy"] == 1.0
    tuner.save(tmp_path / "saved")
    names = [tuner.label_names[number] for number in logits_of(tmp_path / "saved").argmax(-1).tolist()]
    assert tuner.predict(TEXTS) == names == [row["label"] for row in ROWS]


def test_lora_takes_all_linear_layers_where_peft_names_none(tmp_path):
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    ids = dict(pad_token_id=0, cls_token_id=1, sep_token_id=1, bos_token_id=1, eos_token_id=1)
    config = ModernBertConfig(vocab_size=VOCABULARY, **sizes, **ids)
    ModernBertForSequenceClassification(config).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    tuner = FineTuner(tmp_path, **SETTINGS, peft="lora", data_path=ROWS, valid_data_path=ROWS, batch_size=3, iters=3)
    plain = ModernBertForSequenceClassification(config)
    linear = {n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("model.")}
    adapted = {n for n, m in tuner.model.get_base_model().named_modules() if hasattr(m, "lora_A")}
    assert adapted == linear
    tuner.train()
    tuner.save(tmp_path / "adapter")
    again = FineTuner(tmp_path / "adapter", speed="off")
    assert again.predict(TEXTS, return_probabilities=True) == tuner.predict(TEXTS, return_probabilities=True)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").peft_type == "LORA"
