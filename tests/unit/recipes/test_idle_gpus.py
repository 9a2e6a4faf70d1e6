"""GPUs that a job leaves idle are named in a warning."""

from types import SimpleNamespace

import pytest
import torch

from lm_experiments_tools.recipes.common import warn_of_idle_gpus

ARGS = SimpleNamespace(device_map=None)


def said(caplog, seen, args=ARGS, device="cuda"):
    """The warnings of rank 0 in a job whose workers see (machine, GPUs)."""
    caplog.clear()
    warn_of_idle_gpus(args, SimpleNamespace(gather=lambda _: seen, is_main=True, device=torch.device(device)))
    return [record.message for record in caplog.records]


@pytest.mark.parametrize(
    "seen, idle",
    [
        ([("a", 8)], ["7 of the 8 GPUs of a are idle"]),
        ([("a", 8)] * 2, ["6 of the 8 GPUs of a are idle"]),
        ([("a", 4)] * 4 + [("b", 4)] * 3, ["1 of the 4 GPUs of b are idle"]),
        ([("a", 2)] * 2, []),
        ([("a", 1)] * 8, []),  # each worker is shown a GPU of its own
    ],
)
def test_idle_gpus_are_named_with_the_launcher_for_them(caplog, seen, idle):
    warnings = said(caplog, seen)
    assert [warning.partition(":")[0] for warning in warnings] == idle
    assert all("torchrun --nproc_per_node" in warning for warning in warnings)


def test_a_model_over_all_gpus_and_a_run_on_the_cpu_leave_none_idle(caplog):
    assert not said(caplog, [("a", 8)], args=SimpleNamespace(device_map="auto"))
    assert not said(caplog, [("a", 8)], device="cpu")
