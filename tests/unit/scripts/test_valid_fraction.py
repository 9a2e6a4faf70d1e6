"""`--valid_fraction`: runs that are validated on documents held out of their own text."""

import json
import math

import pytest

import run_t5_pretraining
from lm_experiments_tools.tools.main import main as lmtools
from tests.helpers.runs import records, refused, tiny_run, words


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def t5(work, **changed):
    from tests.helpers.runs import TINY

    flags = tiny_run(work, TINY, target_seq_len=16, valid_interval=2, valid_fraction=0.2, save_interval=2)
    return {**flags, "model_path": "run", "iters": 4, **changed}


def test_text_and_its_tokens_are_validated_alike_and_a_resumed_run_goes_on(work):
    run_t5_pretraining.main(words(**t5(work)))
    valid = [(line["step"], line["loss"]) for line in records("run", "valid")]
    assert [step for step, _ in valid] == [2, 4]
    flags = t5(work, model_path="stopped")
    run_t5_pretraining.main(words(**{**flags, "iters": 2, "num_training_steps": None}))
    run_t5_pretraining.main(words(**flags))
    assert [(line["step"], line["loss"]) for line in records("stopped", "valid")] == valid
    refused(lambda: run_t5_pretraining.main(words(**{**flags, "valid_fraction": 0.3})), "valid_fraction .0.2 then")
    text, vocab = str(flags["data_path"]), str(flags["vocab"])
    assert lmtools(["tokenize", "--input", text, "--vocab", vocab, "--output", "tokens", "--workers", "1"]) == 0
    run_t5_pretraining.main(words(**t5(work, data_path="tokens", model_path="of_tokens")))
    assert [(line["step"], line["loss"]) for line in records("of_tokens", "valid")] == valid


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"streaming": True}, "--valid_fraction needs all documents before training"),
        ({"valid_data_path": "text.jsonl"}, "--valid_fraction and --valid_data_path exclude each other"),
        ({"epochs": 1}, "--iters and --epochs exclude each other"),
        ({"epochs": 1, "iters": None, "streaming": True, "valid_fraction": None}, "--epochs needs the number of rows"),
        ({"valid_fraction": 1}, "--valid_fraction is 1.0: it must be above 0 and below 1"),
        ({"valid_fraction": 1e-9}, "holds out none of the 40 documents"),
        ({"data_path": None, "validate_only": True}, "--valid_fraction holds out documents of --data_path"),
    ],
)
def test_where_nothing_can_be_held_out_one_sentence_says_so(work, changed, sentence):
    refused(lambda: run_t5_pretraining.main(words(**t5(work, **changed))), sentence)


@pytest.mark.slow
def test_epochs_are_as_many_updates_and_a_resumed_run_makes_the_rest(work):
    """Of the rows that are not held out; a restart with more epochs goes on."""
    run_t5_pretraining.main(words(**t5(work, iters=None, epochs=1.5, save_interval=None)))
    recorded = json.loads((work / "run" / "config.json").read_text())
    (end,) = [line for line in records("run") if line["step"] == recorded["iters"]]
    rows = json.loads((work / "run" / "last" / "trainer_state.json").read_text())["state"]["samples_per_epoch"]
    assert recorded["epochs"] is None and recorded["iters"] == math.ceil(1.5 * rows / 4) == max(
        line["step"] for line in records("run")
    )
    run_t5_pretraining.main(words(**t5(work, iters=None, epochs=2, save_interval=None)))
    assert max(line["step"] for line in records("run")) == math.ceil(2 * rows / 4) > end["step"]
