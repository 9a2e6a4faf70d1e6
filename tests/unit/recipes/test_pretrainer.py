"""PreTrainer: what the pre-training scripts do, from Python."""

import json
import re
import signal
import sys

import psutil
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    get_cosine_schedule_with_warmup,
)

from lm_experiments_tools import FineTuner, PreTrainer, UserError
from lm_experiments_tools.recipes.bert import BertPretraining
from lm_experiments_tools.training.trainer import TrainingLoop
from run_t5_pretraining import main as pretrain_t5
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


def bert(work, **settings):
    usual = {"data_path": "text.jsonl", "tokenizer": byte_level_tokenizer(work / "tokenizer.json"), "packing": "none"}
    sizes = {"input_seq_len": 32, "batch_size": 4, "log_interval": 1}
    return PreTrainer("bert.json", model_cls="transformers:BertForMaskedLM", **{**usual, **sizes, **settings})


def test_training_is_that_of_the_script(work):
    """And a second call continues the first one, bit for bit."""
    flags = {"iters": 4, "lr": 1e-3, "seed": 3, "valid_interval": 2, "valid_samples": 8}
    command = {"data_path": "text.jsonl", "valid_data_path": "text.jsonl", "model_cfg": "tiny.json"}
    command |= {"vocab": numbered_words_vocabulary(work), "input_seq_len": 32, "target_seq_len": 16, "batch_size": 4}
    line = words(**command, **flags, data_n_workers=1, log_interval=1, model_path="script", num_training_steps=None)
    pretrain_t5(line)
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
    run = bert(work, iters=2, valid_data_path="text.jsonl")
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
        ({"model_cfg": "bert.json", "vocab": "toy"}, "PreTrainer has no setting 'vocab': here it is called tokenizer"),
        ({"model_cfg": None}, "no model is named"),
    ],
)
def test_refusals(work, settings, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        t5(work, **settings) if "model_cfg" not in settings else PreTrainer(**settings, data_path="text.jsonl", lr=1.0)


@pytest.mark.parametrize("make", [t5, bert])
@pytest.mark.parametrize("validation", [{"valid_data_path": "text.jsonl"}, {"valid_fraction": 0.2}])
def test_a_run_is_evaluated_and_then_trained_on(work, make, validation):
    settings = {"lr": 1e-3, "iters": 2, "valid_samples": 8, "model_path": "run", "valid_data_path": None, **validation}
    metrics = make(work, **settings).train()
    again = make(work, **settings)
    assert again.evaluate() == pytest.approx(metrics["valid"], rel=1e-6)
    again.train(iters=4)
    assert len(losses("run")) == 4


@pytest.mark.parametrize("unit", ["iters", "epochs"])
def test_a_longer_second_call_has_the_usual_schedule_of_the_whole_length(work, unit):
    run = t5(work, iters=4, model_path="run", valid_data_path=None)
    run.train()
    run.train(**{unit: 8 if unit == "iters" else 8 * 4 / run._recipe.data.train.samples_per_epoch})
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr"] for line in lines if line["split"] == "train"}
    # The cosine of transformers of 8 updates, 1 of them warm-up, after 4 updates of one half as long.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-2)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 8)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [rates[step] for step in (5, 6, 7, 8)] == pytest.approx(expected[4:])
    assert run.args.num_training_steps is None


def test_a_refused_call_keeps_the_trained_model_and_the_settings(work):
    run = t5(work, iters=2, lr=1e-3, model_path="run")
    metrics = run.train()
    with pytest.raises(UserError, match="seed"):
        run.train(seed=5)
    assert run.evaluate() == pytest.approx(metrics["valid"], rel=1e-6)
    run.save("mine")
    run.train(iters=4)
    assert len(losses("run")) == 4


def test_a_call_that_fails_after_its_start_can_be_made_again(work):
    run = t5(work, iters=2, lr=1e-3, model_path="run")
    metrics = run.train()
    with pytest.raises(UserError, match="has ended"):
        run.train(iters=4, lr_scheduler="linear", resume="run/last", num_training_steps=2)
    with pytest.raises(UserError, match="save: there is no model, or the last start failed: call train"):
        run.save("mine")
    assert run.evaluate() == pytest.approx(metrics["valid"], rel=1e-6)
    run.train(iters=4)
    assert len(losses("run")) == 4


def test_the_words_auto_and_none_for_a_folder_mean_what_the_flag_means(work, caplog, monkeypatch):
    monkeypatch.delenv("LMTOOLS_RUNS", raising=False)
    run = t5(work, iters=2, lr=1e-3, model_path="auto", valid_data_path=None)
    caplog.set_level("INFO")
    run.train()
    (folder,) = (work / "runs").iterdir()
    assert folder.name.startswith("t5-") and run.args.model_path == f"runs/{folder.name}"
    run.train(iters=4)
    assert len(losses(folder)) == 4 and "4 updates, " in caplog.text
    assert f"run directory: runs/{folder.name}" in caplog.messages[-1] and "next:" not in caplog.text
    refused = t5(work, lr=1e-3, model_path="auto", data_path="absent.jsonl")
    with pytest.raises(UserError, match="absent"):
        refused.train()
    assert refused.args.model_path == "auto" and len(list((work / "runs").iterdir())) == 1
    assert t5(work, iters=1, lr=1e-3, model_path="none").args.model_path is None


def test_the_stop_button_of_a_notebook_ends_training_alone(work, monkeypatch, caplog):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as at Python's prompt and in IPython
    monkeypatch.setattr(TrainingLoop, "log_train", lambda loop: signal.raise_signal(signal.SIGINT))
    settings = {"iters": 9, "lr": 1e-3, "log_interval": 2, "model_path": "run", "valid_samples": 8}
    run = t5(work, **settings)
    assert run.train() == {}
    assert "SIGINT: saving a checkpoint and stopping" in caplog.text and "stopped after update 2" in caplog.text
    loss = run.evaluate()["loss"]
    monkeypatch.undo()
    monkeypatch.chdir(work)
    assert loss == pytest.approx(t5(work, **settings).evaluate()["loss"], rel=1e-6)
    assert run.train(iters=3)["valid"]["loss"] != loss and len(losses("run")) == 1


OBJECTIVE = """
from lm_experiments_tools import Objective

class Copied(Objective):
    models = ("encoder-decoder",)
    def example(self, tokens, rng):
        return {"input_ids": tokens, "labels": tokens}
"""


@pytest.mark.slow
def test_no_worker_process_outlives_a_call(work, monkeypatch, caplog):
    (work / "copied_objective.py").write_text(OBJECTIVE)
    monkeypatch.syspath_prepend(work)
    own = {"task": "copied_objective:Copied", "target_seq_len": 128, "data_n_workers": 2, "lr": 1e-3}
    before = {child.pid for child in psutil.Process().children()}

    def workers():
        return {child.pid for child in psutil.Process().children()} - before

    started = []
    log_train = TrainingLoop.log_train

    def log_and_count(loop):
        started.append(len(workers()))
        log_train(loop)

    monkeypatch.setattr(TrainingLoop, "log_train", log_and_count)
    run = t5(work, iters=2, **own)
    run.train()
    assert started == [2, 2] and not workers()
    assert run.evaluate()["loss"] > 0
    with pytest.raises(UserError, match="optimize_metric nope"):
        t5(work, iters=2, optimize_metric="nope", **own).train()
    assert not workers()
    monkeypatch.setattr(TrainingLoop, "log_train", lambda loop: signal.raise_signal(signal.SIGINT))
    run = t5(work, iters=9, **own)
    with pytest.raises(SystemExit):
        run.train()
    assert not workers()
    assert "SIGINT: stopping" in caplog.text and "saving a checkpoint" not in caplog.text
    run.save("interrupted")
