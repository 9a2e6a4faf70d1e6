"""Phases in one run: exact over borders and restarts, with the learning rates, masks and weights that were asked for."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from lm_experiments_tools.checkpoint.tree import load_tree
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.trainer import TrainingLoop
from run_t5_pretraining import main
from tests.helpers.runs import TINY, records, words
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

SHORT = {"iters": 3, "input_seq_len": 24, "target_seq_len": 16, "batch_size": 2, "optimizer_options": ["betas=0.8,0.9"]}
DECAY = {"lr_scheduler": "warmup_stable_decay", "num_warmup_steps": 0}
PHASES = [
    {"iters": 4, "lr_scheduler": "linear", "num_warmup_steps": 2},
    {"iters": 4, "noise_density": 0.3, "target_seq_len": 24, "trained": ["decoder.*"], "gradient_accumulation_steps": 2},
    {**SHORT, **DECAY, "lr_scheduler_options": ["num_decay_steps=2", "decay_type=1-sqrt"]},
]


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    numbered_words_vocabulary(folder)
    for name, number in (("text", 40), ("other", 17)):
        lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(number))}) for i in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.json").write_text(json.dumps(TINY | {"dropout_rate": 0.1}))
    return folder


@pytest.fixture
def work(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    for folder in inputs.glob("run*"):
        shutil.rmtree(folder)
    return inputs


def start(run="run", phases=None, **changed):
    texts = None if phases is None else tuple(map(json.dumps, phases))
    flags = {
        "data_path": "text.jsonl", "valid_data_path": "text.jsonl", "vocab": "vocab.model", "model_cfg": "tiny.json",
        "model_path": run, "input_seq_len": 32, "target_seq_len": 16, "batch_size": 4, "lr": 1e-2, "log_interval": 1,
        "valid_interval": 3, "save_interval": 2, "keep_checkpoints": 20, "save_best": True, "data_n_workers": 1,
        "backend": "local", "data_pipeline": "native", "peak_tflops": 1, "phases": texts, **changed,
    }  # fmt: skip
    main(words(**flags))


def kill_after(monkeypatch, name, number):
    """Raise from the `number`-th call of a method of the trainer, before or after it (`name`, `name.`)."""
    method, calls = getattr(TrainingLoop, name.rstrip(".")), []

    def counted(self, *args, **options):
        calls.append(self)
        if len(calls) == number and not name.endswith("."):
            raise Killed
        result = method(self, *args, **options)
        if len(calls) == number:
            self.saver.wait()
            raise Killed
        return result

    monkeypatch.setattr(TrainingLoop, name.rstrip("."), counted)


def ended(run):
    """Weights, optimizer and state of the newest checkpoint, and the losses that were logged."""
    last = load_tree(f"{run}/last/trainer_state")
    state = {name: value for name, value in last["state"].items() if name != "metrics"}
    optimizer = {**load_file(f"{run}/last/optimizer.safetensors")}
    lines = [(line["step"], split, line["loss"]) for split in ("train", "valid") for line in records(run, split)]
    return load_file(f"{run}/last/model.safetensors"), optimizer, state, lines, last["workers"][0]["random_state"]


def check_equal(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one[2:4] == other[2:4]
    assert torch.equal(one[4]["torch"], other[4]["torch"])


def test_kills_at_and_around_borders_change_no_bit(work, monkeypatch):
    start("run_whole", PHASES)
    whole = ended("run_whole")
    assert whole[2]["step"] == 11 and whole[2]["schedule_start"] == 8 and whole[2]["phase"] == 2
    kills = [("train_step", 4), ("save.", 2), ("__init__", 1), ("__init__.", 2), ("train_step", 1), ("_finish", 1)]
    for name, number in kills:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_after(patch, name, number)
            start(phases=PHASES)
    start(phases=PHASES)
    check_equal(ended("run"), whole)
