"""The error of a run without enough memory."""

import pytest
import torch

from lm_experiments_tools.errors import RunError
from lm_experiments_tools.planning.fit import out_of_memory_explained
from tests.unit.planning.test_plan import OWN_T5, settings
from tests.unit.planning.test_plan import T5 as CONFIG


@pytest.fixture
def args(tmp_path):
    return settings(tmp_path, CONFIG, OWN_T5, batch_size=8, input_seq_len=256)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda: torch.empty(2**50), "can't allocate memory: you tried"),
        (lambda: torch.OutOfMemoryError("CUDA out of memory. GPU 0 has more to say"), "CUDA out of memory"),
    ],
)
def test_running_out_of_memory_says_what_to_try(args, fail, reason):
    with pytest.raises(RunError) as caught, out_of_memory_explained(args):
        raise fail()
    assert str(caught.value).startswith(f"out of memory ({reason}") and "micro-batches of 8. Try" in str(caught.value)
    with pytest.raises(RuntimeError, match="not of memory"), out_of_memory_explained(args):
        raise RuntimeError("not of memory")
