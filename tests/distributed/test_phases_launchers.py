"""A run of phases under launchers: killed at a border, and with --reproducible elastic on 1, 2 and 1 workers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import launch
from tests.distributed.launch import ROOT
from tests.helpers.runs import TINY, losses, words
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

pytestmark = pytest.mark.distributed
PHASES = [
    {"iters": 3, "lr_scheduler": "linear"},
    {"iters": 3, "noise_density": 0.3, "trained": ["decoder.block.*"], "gradient_accumulation_steps": 2},
    {"iters": 2, "input_seq_len": 16, "batch_size": 1},
]
# A script that ends the job after so many calls of a method of the trainer, and then the real one.
KILLED = """
import os, runpy, sys
from lm_experiments_tools.training.trainer import TrainingLoop
name, number = sys.argv.pop(1), int(sys.argv.pop(1))
method, calls = getattr(TrainingLoop, name), []
def counted(self, *args, **options):
    calls.append(name)
    if len(calls) == number:
        self.saver.wait()
        os._exit(7)
    return method(self, *args, **options)
setattr(TrainingLoop, name, counted)
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path):
    numbered_words_vocabulary(tmp_path)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY | {"dropout_rate": 0.1}))
    (tmp_path / "killed.py").write_text(KILLED.format(script=str(ROOT / "run_t5_pretraining.py")))
    return tmp_path


def start(kind, folder, run, kill=(), **changed):
    script = folder / "killed.py" if kill else ROOT / "run_t5_pretraining.py"
    flags = {
        "data_path": folder / "text.jsonl", "vocab": folder / "vocab.model", "model_cfg": folder / "tiny.json",
        "model_path": folder / run, "input_seq_len": 24, "target_seq_len": 16, "batch_size": 2, "lr": 1e-2,
        "log_interval": 1, "save_interval": 2, "data_n_workers": 1, "peak_tflops": 1,
        "phases": tuple(map(json.dumps, PHASES)), **changed,
    }  # fmt: skip
    launch.start(kind, script, *kill, *words(**flags), fails=bool(kill))


def check_equal(one, other):
    for name in ("model", "optimizer"):
        ours, theirs = (load_file(run / "last" / f"{name}.safetensors") for run in (one, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    assert losses(one) == losses(other) and len(losses(one)) == 8


KILLS = [("_finish", 1), ("save", 2), ("__init__", 1), ("__init__", 2)]


@pytest.mark.slow  # tests/unit/scripts/test_phases.py kills one worker every day
@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_two_workers_killed_at_a_border_end_as_two_that_were_not(kind, folder):
    start(kind, folder, "whole")
    for kill in KILLS:
        start(kind, folder, "run", kill)
    start(kind, folder, "run")
    check_equal(folder / "run", folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "zero1", "zero2", "zero3"])
def test_sharded_phases_in_one_command_end_as_in_a_command_each(kind, folder):
    start(kind, folder, "whole")
    for number in (1, 2, 3):
        start(kind, folder, "run", phases=tuple(map(json.dumps, PHASES[:number])))
    check_equal(folder / "run", folder / "whole")


@pytest.mark.slow
def test_elastic_runs_of_one_two_and_one_workers_have_the_same_bits_over_borders(folder):
    how = {"reproducible": "elastic", "virtual_ranks": 2}
    start("alone", folder, "whole", **how)
    start("alone", folder, "run", ("train_step", 3), **how)
    start("ddp", folder, "run", ("train_step", 5), **how)
    start("alone", folder, "run", **how)
    check_equal(folder / "run", folder / "whole")
