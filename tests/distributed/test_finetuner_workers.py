"""FineTuner on two workers: one method after the other, as in one process; one of them writes what is saved."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from lm_experiments_tools.checkpoint.source import TASK_FILE
from tests.distributed.launch import start
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).with_name("finetuner_worker.py")
SHARDED = ("fsdp", "zero2", "zero3")
METHODS = ("evaluate", "train", "save", "evaluate", "train", "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuner")
    save_toy("encoder-decoder", folder / "t5")
    write_json(folder / "train.jsonl", pairs(16))
    return folder


def worker(folder, kind, batch_size, *methods):
    """The loss after each method, and all that was printed."""
    output = start(kind, WORKER, folder / "t5", folder / "train.jsonl", folder / kind, batch_size, *methods)
    return json.loads(re.search(r"losses (\[.*\])", output)[1]), output


@pytest.fixture(scope="module")
def alone(folder):
    return worker(folder, "alone", 8, *METHODS)[0]


@pytest.mark.parametrize("kind", ["ddp", "horovod", *SHARDED])
def test_evaluation_and_training_follow_each_other_as_in_one_process(folder, alone, kind):
    """Where the model is sharded it is so for good, and training again is refused."""
    sharded = kind in SHARDED
    losses, output = worker(folder, kind, 4, *(("train", "save", "evaluate", "train") if sharded else METHODS))
    if sharded:
        assert "save it and load it in a new process" in losses.pop()
    assert losses == pytest.approx(alone[1:3] if sharded else alone, rel=1e-4)  # a new AdamW steps by signs
    assert re.findall(r"written by (\d)", output) == ["0"]
    ours, theirs = (AutoModelForSeq2SeqLM.from_pretrained(folder / run).state_dict() for run in (kind, "alone"))
    assert all(torch.allclose(ours[weight], value, atol=1e-4) for weight, value in theirs.items())
    tasks = [json.loads((folder / run / TASK_FILE).read_text()) for run in (kind, "alone")]
    assert tasks[0] == tasks[1] and tasks[0]["task"] == "text_to_text"


@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_a_model_sharded_by_evaluation_is_not_trained(folder, kind):
    losses, _ = worker(folder, kind, 4, "evaluate", "evaluate", "train")
    assert losses[0] == losses[1] and "train first and evaluate then" in losses[2]
