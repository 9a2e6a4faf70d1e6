"""`--profile`: which steps are traced, and what the table and the trace say of them."""

import json
from collections import Counter

import pytest
import torch

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
