"""A run with `--reproducible elastic` is the same to the bit whatever computes it: dropout, widths that vary,
validation, a schedule, several epochs; numbers of workers and backends that change at each restart.
"""

import re
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, start

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests" / "distributed" / "elastic_worker.py"
STEPS = 9
OTHERS = [("ddp", 2), ("ddp", 4), ("ddp", 6), ("ddp", 12), ("horovod", 3), ("horovod", 4)]


def digest(folder: Path, step: int, kind: str, workers: int = 1, *flags: str) -> str:
    output = start(kind, WORKER, folder, step, *flags, workers=workers, timeout=200)
    [(found, size)] = re.findall(r"digest (\w+) of backend \w+, (\d+) worker", output)
    assert size == str(workers)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return digest(tmp_path_factory.mktemp("elastic") / "whole", STEPS, "alone")


def test_other_workers_and_backends_continue_a_run_to_the_same_bits(uninterrupted, tmp_path):
    digest(tmp_path, 5, "horovod", 2)
    assert digest(tmp_path, STEPS, "alone") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("kind, workers", OTHERS)
def test_any_number_of_workers_gives_the_same_bits(kind, workers, uninterrupted, tmp_path):
    assert digest(tmp_path, STEPS, kind, workers) == uninterrupted


@pytest.mark.slow
def test_a_fixed_run_gives_the_same_bits_on_both_backends_and_keeps_its_workers(tmp_path):
    flags = ("reproducible=fixed",)
    whole = digest(tmp_path / "whole", STEPS, "ddp", 3, *flags)
    digest(tmp_path / "parts", 4, "horovod", 3, *flags)
    assert digest(tmp_path / "parts", STEPS, "ddp", 3, *flags) == whole
    output = start("ddp", WORKER, tmp_path / "parts", STEPS + 1, *flags, fails=True)
    assert "fixed with 3 ranks, and this start has fixed with 2" in output, output[-2000:]
