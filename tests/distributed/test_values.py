"""FLOPs of two workers; the worker, step and module of an infinity are in rank 0's log."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed.launch import ROOT, start
from tests.distributed.values_worker import PEAK
from tests.helpers.toys import tiny_t5

WORKER = ROOT / "tests" / "distributed" / "values_worker.py"


def share_of_peak(folder) -> float:
    """The FLOP of three steps that the log's mfu means."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    line = next(record for record in records if "mfu" in record)
    return line["mfu"] * line["seconds_per_step"] * line["step"] * PEAK * 1e12


def operations(rows: int, inputs: int, targets: int) -> int:
    """Count a forward and a backward pass."""
    model = tiny_t5()
    model.set_attn_implementation("eager")  # torch counts no fused attention of a CPU
    with FlopCounterMode(display=False) as counted:
        model(torch.ones(rows, inputs).long(), labels=torch.ones(rows, targets).long()).loss.backward()
    return counted.get_total_flops()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_flops_and_the_non_finite_module_of_two_workers(kind, tmp_path):
    start(kind, WORKER, tmp_path)
    shapes = json.loads((tmp_path / "watched" / "shapes.json").read_text())
    assert len(shapes) == 3 * 2  # of rank 0, one in two of which alone has all
    tokens = [rows * (inputs + targets) for rows, inputs, targets in shapes]
    done = operations(*shapes[0]) * sum(tokens) / tokens[0]  # the first micro-batch is counted
    assert share_of_peak(tmp_path / "watched") == pytest.approx(done)
    log = (tmp_path / "broken" / "logs" / "rank0.log").read_text()
    where = "encoder.block.1.layer.1.DenseReluDense.wo (Linear): its output"
    assert f"step 2, rank 1: first not finite: {where}" in log
    assert log.count("first not finite") == 1
    assert "step 2: parameters whose gradient norm is not finite: " in log
