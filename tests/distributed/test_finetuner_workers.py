"""FineTuner on two workers: one method after the other, as in one process; one of them writes what is saved."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from lm_experiments_tools.checkpoint.source import TASK_FILE
from tests.distributed.launch import SHIM, forked, horovodrun, missing, shim, torchrun
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("finetuner_worker.py")
LAUNCHERS = {
    "torchrun": (torchrun, ()),
    "horovodrun": (horovodrun, ("horovod",)),
    "fsdp": (lambda: shim("fsdp"), ()),
    "zero2": (lambda: shim("zero2"), ("deepspeed",)),
    "zero3": (lambda: shim("zero3"), ("deepspeed",)),
}
SHARDED = ("fsdp", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuner")
    save_toy("encoder-decoder", folder / "t5")
    write_json(folder / "train.jsonl", pairs(16))
    return folder


def worker(folder, name, launcher, batch_size, *steps):
    """The loss after each step, and all that was printed."""
    cpu = {} if str(SHIM) in launcher else {"ACCELERATE_USE_CPU": "true"}
    job = forked(launcher, WORKER, folder / "t5", folder / "train.jsonl", folder / name, batch_size, *steps, **cpu)
    found = re.search(r"losses (\[.*\])", job.output)
    assert found and job.returncode == 0, job.output[-4000:]
    return json.loads(found[1]), job.output


@pytest.fixture(scope="module")
def alone(folder):
    steps = ("evaluate", "train", "save", "evaluate", "train", "evaluate")
    return worker(folder, "alone", [sys.executable], 8, *steps)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_evaluation_and_training_follow_each_other_as_in_one_process(folder, alone, name):
    """Where the model is sharded it is so for good, and training again is refused."""
    launcher, modules = LAUNCHERS[name]
    if reason := missing(*modules):
        pytest.skip(reason)
    sharded = name in SHARDED
    steps = (
        ("train", "save", "evaluate", "train")
        if sharded
        else ("evaluate", "train", "save", "evaluate", "train", "evaluate")
    )
    losses, output = worker(folder, name, launcher(), 4, *steps)
    if sharded:
        assert "save it and load it in a new process" in losses.pop()
    assert losses == pytest.approx(alone[1:3] if sharded else alone, rel=1e-4)  # a new AdamW steps by signs
    assert re.findall(r"written by (\d)", output) == ["0"]
    ours, theirs = (AutoModelForSeq2SeqLM.from_pretrained(folder / run).state_dict() for run in (name, "alone"))
    assert all(torch.allclose(ours[weight], value, atol=1e-4) for weight, value in theirs.items())
    tasks = [json.loads((folder / run / TASK_FILE).read_text()) for run in (name, "alone")]
    assert tasks[0] == tasks[1] and tasks[0]["task"] == "text_to_text"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_a_model_sharded_by_evaluation_is_not_trained(folder, name):
    launcher, modules = LAUNCHERS[name]
    if reason := missing(*modules):
        pytest.skip(reason)
    losses, _ = worker(folder, name, launcher(), 4, "evaluate", "evaluate", "train")
    assert losses[0] == losses[1] and "train first and evaluate then" in losses[2]
