"""PreTrainer: what the pre-training scripts do, from Python."""

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from lm_experiments_tools import FineTuner, PreTrainer, UserError
from lm_experiments_tools.recipes.bert import BertPretraining
from tests.helpers import ROOT
from tests.helpers.runs import BERT, TINY, losses, words, write_text
from tests.helpers.tokenizer_toys import byte_level_tokenizer
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    numbered_words_vocabulary(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "bert.json").write_text(json.dumps(BERT))
    return tmp_path


def t5(work, **settings):
    usual = {"data_path": "text.jsonl", "valid_data_path": "text.jsonl", "vocab": numbered_words_vocabulary(work)}
    sizes = {"input_seq_len": 32, "target_seq_len": 16, "batch_size": 4, "data_n_workers": 1, "log_interval": 1}
    return PreTrainer(work / "tiny.json", **{**usual, **sizes, **settings})


def test_training_is_that_of_the_script(work):
    """And a second call continues the first one, bit for bit."""
    flags = {"iters": 4, "lr": 1e-3, "seed": 3, "valid_interval": 2, "valid_samples": 8}
    command = {"data_path": "text.jsonl", "valid_data_path": "text.jsonl", "model_cfg": "tiny.json"}
    command |= {"vocab": numbered_words_vocabulary(work), "input_seq_len": 32, "target_seq_len": 16, "batch_size": 4}
    line = words(**command, **flags, data_n_workers=1, log_interval=1, model_path="script", num_training_steps=None)
    subprocess.run([sys.executable, ROOT / "run_t5_pretraining.py", *line], check=True, capture_output=True)
    run = t5(work, **{**flags, "iters": 2}, model_path="run")
    run.train()
    metrics = run.train(iters=4)
    assert losses("run") == losses("script") and len(losses("run")) == 4
    assert metrics == json.loads((work / "script" / "metrics.json").read_text())
    assert run.evaluate() == pytest.approx(metrics["valid"], rel=1e-6)
    assert t5(work, **flags, model_path="run").evaluate() == pytest.approx(metrics["valid"], rel=1e-6)
    run.save(work / "mine")
    saved = AutoModelForSeq2SeqLM.from_pretrained(work / "mine")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(work / "mine")("word1")["input_ids"]
    assert FineTuner(work / "mine").predict(["word1 token2"])


def test_a_short_call_trains_with_a_usual_rate(work):
    run = PreTrainer("t5-micro", data_path=work / "text.jsonl", vocab=numbered_words_vocabulary(work), iters=2)
    assert run.args.optimizer == "AdamWScale" and run.args.lr == 2e-2 and run.args.warmup_ratio == 0.1
    assert run.args.model_path is None
    metrics = run.train(log_interval=1)
    assert metrics["train"]["loss"] > 0 and not (work / "runs").exists()
    table = metrics._repr_html_()
    assert "<th>train</th>" in table and f"<td>{metrics['train']['loss']:.4g}</td>" in table
    with pytest.raises(UserError, match="no validation data: give valid_data_path or valid_fraction"):
        run.evaluate()


def test_an_encoder_takes_the_recipe_of_bert_on_plain_text(work):
    run = PreTrainer(
        "bert.json", model_cls="transformers:BertForMaskedLM", data_path="text.jsonl", valid_data_path="text.jsonl",
        tokenizer=byte_level_tokenizer(work / "tokenizer.json"), iters=2, batch_size=4, input_seq_len=32,
        log_interval=1, packing="none",
    )  # fmt: skip
    metrics = run.train()
    assert isinstance(run._recipe, BertPretraining) and run.args.packing == "none"
    assert run.evaluate() == metrics["valid"] and 0 <= metrics["valid"]["accuracy_mlm"] <= 1
    run.save("encoder")
    assert AutoModelForMaskedLM.from_pretrained(work / "encoder").config.model_type == "bert"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch": 4}, "PreTrainer has no setting 'batch': did you mean batch_size"),
        ({"validate_only": True}, "PreTrainer does not take validate_only"),
        ({"batch_size": "8"}, "--batch_size is '8': it must be a whole number"),
        ({"packing": "none"}, "PreTrainer has no setting 'packing'"),
        ({"model_cfg": "bert.json", "vocab": "toy"}, "PreTrainer has no setting 'vocab': here it is called tokenizer"),
        ({"data_path": ()}, "--data_path is missing"),
        ({"model_cfg": None}, "no model is named"),
    ],
)
def test_refusals(work, settings, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        t5(work, **settings) if "model_cfg" not in settings else PreTrainer(**settings, data_path="text.jsonl", lr=1.0)


def test_what_needs_a_model_or_a_folder_says_so(work):
    run = t5(work, iters=1)
    with pytest.raises(UserError, match="save: the model is built by train"):
        run.save("mine")
    with pytest.raises(UserError, match="the weights are random"):
        run.evaluate()
    run.train()
    with pytest.raises(UserError, match="give both the same one"):
        run.train(iters=2)
