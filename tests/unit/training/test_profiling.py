"""`--profile`: which steps are traced, and what the table and the trace say of them."""

import json
from collections import Counter

import pytest
import torch

from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.helpers.toys import TinyLabeller, tiny_t5
from tests.unit.training.test_trainer import make_loop


def settings(folder, **rest):
    return {"iters": 8, "log_interval": 2, "model_path": str(folder), **rest}


def test_the_training_is_the_same_bit_for_bit(tmp_path):
    weights = []
    for name, flags in (("plain", {}), ("traced", {"profile": 2, "profile_after": 3})):
        loop = make_loop(settings(tmp_path / name, **flags), model=tiny_t5(dropout=0.1))
        loop.train()
        weights.append(loop.backend.model.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    text = (tmp_path / "traced" / "profile" / "steps_4-5.txt").read_text()
    trace = json.loads((tmp_path / "traced" / "profile" / "steps_4-5_rank_0.json").read_text())["traceEvents"]
    counts = Counter(event.get("name") for event in trace)
    assert counts["Optimizer.step#AdamW.step"] == 2 <= counts["data wait"]
    (row,) = (line.split() for line in text.splitlines() if line.strip().startswith("aten::mm "))
    assert int(row[-1]) == counts["aten::mm"] > 0
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.parametrize(
    ("flags", "traced"),
    [
        ({"profile": 2}, (6, 7)), ({"profile": 6}, (3, 8)), ({"profile_after": 2}, (3, 5)),
        ({"profile": 1, "profile_after": 7}, (8, 8)),
    ],
)  # fmt: skip
def test_the_steps_that_are_traced(tmp_path, flags, traced):
    make_loop(settings(tmp_path, **flags), model=TinyLabeller()).train()
    first, last = traced
    assert {f.name for f in (tmp_path / "profile").iterdir()} == {
        f"steps_{first}-{last}.txt", f"steps_{first}-{last}_rank_0.json",
    }  # fmt: skip


def test_a_resumed_run_is_traced_after_its_own_start_or_says_that_it_is_not(tmp_path, caplog):
    make_loop(settings(tmp_path, iters=4), model=TinyLabeller()).train()
    with caplog.at_level("INFO"):
        make_loop(settings(tmp_path, profile=3, profile_after=1), model=TinyLabeller()).train()
    assert "--profile traces nothing: updates 2 to 4 are not among 6 to 8 of this start" in caplog.text
    assert not (tmp_path / "profile").exists()
    make_loop(settings(tmp_path, iters=20, profile=3), model=TinyLabeller()).train()
    assert (tmp_path / "profile" / "steps_14-16.txt").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"profile": 8}, "--profile 8, begun after update 1, is not over by --iters 8"),
        ({"profile": 1, "model_path": ""}, "--profile needs --model_path"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_refused(tmp_path, flags, said):
    with pytest.raises(UserError, match=said):
        args = TrainerArgs(**settings(tmp_path, **flags))
        args.check()
        args.check_used()
