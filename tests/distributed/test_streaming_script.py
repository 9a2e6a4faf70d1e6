"""run_t5_pretraining.py --streaming as a job: killed and started again, with the cache lost, and on two workers."""

import shutil
import sys

import pytest

from tests.distributed.launch import forked, missing, torchrun
from tests.distributed.test_run_script import (
    CPU,
    SCRIPT,
    STEPS,
    flags,
    kill_after,
    losses,
    text,  # noqa: F401 (a fixture)
)

pytestmark = pytest.mark.distributed


def streamed(folder, run_dir, batch_size=8, accumulation=1):
    command = flags(folder, run_dir, batch_size, accumulation)
    working_dir = run_dir / "work"
    working_dir.mkdir(exist_ok=True)
    command[command.index("--working_dir") + 1] = working_dir
    return [SCRIPT, *command, "--streaming", "--streams", 2, "--data_n_workers", 1]


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = forked([sys.executable], *streamed(text, folder))
    assert job.returncode == 0, job.output[-3000:]
    assert "in 2 streams" in job.output
    found = losses(folder)
    assert found[-1][0] == STEPS and found[-1][1] < found[0][1] - 0.5  # it learned
    return folder


def test_killed_and_started_again_without_its_cache_it_ends_with_the_same_losses(text, uninterrupted, tmp_path):  # noqa: F811
    command = streamed(text, tmp_path)
    kill_after([sys.executable], command, {}, tmp_path / "checkpoints" / "step_000010")
    shutil.rmtree(tmp_path / "work" / ".cache")
    job = forked([sys.executable], *command)
    assert job.returncode == 0, job.output[-3000:]
    assert "resumed from" in job.output
    assert losses(tmp_path) == losses(uninterrupted)


@pytest.mark.slow
def test_two_workers_end_with_the_losses_of_one(text, uninterrupted, tmp_path):  # noqa: F811
    if reason := missing("accelerate"):
        pytest.skip(reason)
    job = forked(torchrun(), *streamed(text, tmp_path, 2, 2), timeout=300, **CPU)
    assert job.returncode == 0, job.output[-3000:]
    for (step, ours), (_, theirs) in zip(losses(tmp_path), losses(uninterrupted), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4), step
