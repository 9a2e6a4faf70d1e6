"""A run with `--reproducible elastic` is the same to the bit whatever computes it: dropout, widths that vary,
validation, a schedule, several epochs; numbers of workers and backends that change at each restart.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, forked, horovodrun, missing, torchrun

WORKER = ROOT / "tests" / "distributed" / "elastic_worker.py"
STEPS = 9
LAUNCHERS = {"alone": lambda workers: [sys.executable], "ddp": torchrun, "horovod": horovodrun}
OTHERS = [("ddp", 2), ("ddp", 4), ("ddp", 6), ("ddp", 12), ("horovod", 3), ("horovod", 4)]


def digest(folder: Path, step: int, launcher: str, workers: int = 1, *flags: str) -> str:
    if reason := missing(*{"ddp": ["accelerate"], "horovod": ["horovod"]}.get(launcher, ())):
        pytest.skip(reason)
    extra = {"ACCELERATE_USE_CPU": "true"} if launcher == "ddp" else {}
    job = forked(LAUNCHERS[launcher](workers), WORKER, folder, step, *flags, timeout=200, **extra)
    found = re.findall(r"digest (\w+) of backend \w+, (\d+) worker", job.output)
    assert job.returncode == 0 and len(found) == 1, job.output[-4000:]
    assert found[0][1] == str(workers)
    return found[0][0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return digest(tmp_path_factory.mktemp("elastic") / "whole", STEPS, "alone")


@pytest.mark.distributed
def test_other_workers_and_backends_continue_a_run_to_the_same_bits(uninterrupted, tmp_path):
    digest(tmp_path, 5, "ddp", 3)
    assert digest(tmp_path, STEPS, "horovod", 2) == uninterrupted


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("launcher, workers", OTHERS)
def test_any_number_of_workers_gives_the_same_bits(launcher, workers, uninterrupted, tmp_path):
    assert digest(tmp_path, STEPS, launcher, workers) == uninterrupted


@pytest.mark.distributed
@pytest.mark.slow
def test_a_fixed_run_gives_the_same_bits_on_both_backends_and_keeps_its_workers(tmp_path):
    flags = ("reproducible=fixed",)
    whole = digest(tmp_path / "whole", STEPS, "ddp", 3, *flags)
    digest(tmp_path / "parts", 4, "horovod", 3, *flags)
    assert digest(tmp_path / "parts", STEPS, "ddp", 3, *flags) == whole
    job = forked(torchrun(2), WORKER, tmp_path / "parts", STEPS + 1, *flags, ACCELERATE_USE_CPU="true")
    assert job.returncode != 0 and "fixed of 3 worker(s)" in job.output, job.output[-2000:]
