"""A run directory that is not one folder for all machines serves as far as rank 0's alone does, and no further."""

from __future__ import annotations

import pytest

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training import run_folder


class OfTwo(LocalBackend):
    """Rank 0 of a job whose other worker, on lmtb, sees this folder or one of its own, with a step or none."""

    world_size = 2

    def __init__(self, sees=False, step=-1):
        super().__init__()
        self.sees, self.step = sees, step

    def gather(self, value):
        return [value, ("lmtb", None) if len(value) == 2 else ("lmtb", self.sees, self.step)]


@pytest.fixture
def args(tmp_path):
    (tmp_path / "checkpoints" / "step_000007").mkdir(parents=True)
    return TrainerArgs(model_path=str(tmp_path))


def test_a_shared_folder_is_left_as_it_is(args, tmp_path):
    run_folder.claim_for_all(args, OfTwo(sees=True, step=7))
    assert not list(tmp_path.glob(".seen-*"))


def test_a_newer_checkpoint_on_another_machine_is_refused(args):
    with pytest.raises(UserError, match=r"on lmtb has the checkpoint of step 8, and .* rank 0 is now, ends at step 7"):
        run_folder.claim_for_all(args, OfTwo(step=8))
    run_folder.claim_for_all(args, OfTwo(step=7))  # an earlier start's


def test_a_backend_that_shards_needs_a_shared_folder(args):
    backend = OfTwo()
    backend.state.is_sharded = True
    with pytest.raises(UserError, match=r"is not the folder of that name on lmtb: FSDP and ZeRO .*--model_path"):
        run_folder.claim_for_all(args, backend)
