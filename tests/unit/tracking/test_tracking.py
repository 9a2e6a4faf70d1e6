"""TensorBoard files read back with TensorBoard's own reader, and the metrics record."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from lm_experiments_tools.files import to_jsonable
from lm_experiments_tools.tracking.tracker import Tracker, save_metrics

# tensorboard's reader imports TensorFlow where it is installed, unless this marker of its own can be imported
sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))


def strict_lines(path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    """Everything TensorBoard would show of a run directory."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def log_step(tracker: Tracker, step: int, loss: float | None = None) -> None:
    tracker.log(
        "train",
        step,
        step * 8,
        step * 8 * 100,
        {"loss": float(step) if loss is None else loss},
        extra={
            "gradients_global_norm": 0.5,
            "weights_global_norm": 2.0,
            "seconds_per_step": 0.25,
            "tokens_per_second": 1000.0,
            "data_wait_fraction": 0.018,
            "memory_mib": 2048.0,
            "skipped_updates": 0,
            "param_groups": [{"lr": 0.1, "scaled_lr": 0.01}, {"lr": 0.2}],
        },
    )


def test_tags_are_the_ancestors(tmp_path):
    with Tracker(tmp_path, rank=0) as tracker:
        log_step(tracker, 10)
        tracker.log("valid", 10, 80, 8000, {"loss": 3.0, "exact_match": 0.5})
        tracker.log("valid", 10, 80, 8000, {}, extra={"patience": 1})
    found = scalars(tmp_path)
    x = {"iterations": 10, "samples": 80, "tokens": 8000}
    expected = {}
    for axis, at in x.items():
        expected[f"loss/{axis}/train"] = [(at, 10.0)]
        expected[f"loss/{axis}/valid"] = [(at, 3.0)]
        expected[f"exact_match/{axis}/valid"] = [(at, 0.5)]
        expected[f"gradients_global_norm/{axis}"] = [(at, 0.5)]
        expected[f"weights_global_norm/{axis}"] = [(at, 2.0)]
        expected[f"patience/{axis}"] = [(at, 1.0)]
        expected[f"time/{axis}/per_iter"] = [(at, 0.25)]
        expected[f"lr/{axis}/param_group_0"] = [(at, pytest.approx(0.1))]
        expected[f"lr/{axis}/param_group_1"] = [(at, pytest.approx(0.2))]
        expected[f"scaled_lr/{axis}/param_group_0"] = [(at, pytest.approx(0.01))]
    expected |= {"throughput/tokens_per_second": [(10, 1000.0)], "memory/peak_mib": [(10, 2048.0)]}
    expected |= {"time_metrics/data_wait_fraction": [(10, pytest.approx(0.018))], "nonfinite/count": [(10, 0.0)]}
    assert found == expected


def test_metrics_record(tmp_path):
    with Tracker(tmp_path, rank=0) as tracker:
        log_step(tracker, 10, loss=math.nan)
    (record,) = strict_lines(tmp_path / "metrics.jsonl")
    assert record["time"] > 1e9
    numbers = {"step": 10, "split": "train", "samples": 80, "tokens": 8000, "loss": None, "lr": 0.1, "scaled_lr": 0.01}
    numbers |= {"gradients_global_norm": 0.5, "weights_global_norm": 2.0, "tokens_per_second": 1000.0}
    numbers |= {"seconds_per_step": 0.25, "memory_mib": 2048.0, "data_wait_fraction": 0.018, "skipped_updates": 0}
    assert numbers.items() <= record.items() and record["lr_param_groups"] == [0.1, 0.2]
    assert math.isnan(scalars(tmp_path)["loss/iterations/train"][0][1]), "TensorBoard shows that it was not finite"


def test_no_step_is_doubled_or_lost_after_any_number_of_restarts(tmp_path):
    """Killed (never closed) after logging to 12, 25, 31; restarted from 10, 20, 20. All within one second."""
    start = 0
    for stop, resume in ((12, 10), (25, 20), (31, 20), (35, None)):
        tracker = Tracker(tmp_path, rank=0, start_step=start)
        for step in range(start + 1, stop + 1):
            log_step(tracker, step, loss=step + stop / 100)
        start = resume
    found = scalars(tmp_path)
    losses = [s + (12 if s <= 10 else 25 if s <= 20 else 35) / 100 for s in range(1, 36)]
    for axis, scale in (("iterations", 1), ("samples", 8), ("tokens", 800)):
        points = found[f"loss/{axis}/train"]
        assert [step for step, _ in points] == [scale * step for step in range(1, 36)], axis
        assert [value for _, value in points] == pytest.approx(losses), axis
        assert [step for step, _ in found[f"lr/{axis}/param_group_1"]] == [scale * s for s in range(1, 36)]
    assert {len(points) for points in found.values()} == {35}
    records = strict_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 36))
    superseded = strict_lines(tmp_path / "metrics.superseded.jsonl")
    assert [record["step"] for record in superseded] == [11, 12, *range(21, 26), *range(21, 32)]


def test_what_a_start_writes_again_at_its_first_step_is_there_once(tmp_path):
    """Its validation makes up for one that a signal cut short, and kills came before the next checkpoint."""
    with Tracker(tmp_path, rank=0) as tracker:
        log_step(tracker, 1)
        log_step(tracker, 2, loss=7.0)
    for again in ((), ("valid",), ("valid",)):
        with Tracker(tmp_path, rank=0, start_step=2, again=again) as tracker:
            tracker.log("valid", 2, 20, 200, {"loss": 5.0})
    records = [(r["step"], r["split"], r["loss"]) for r in strict_lines(tmp_path / "metrics.jsonl")]
    assert records[1:] == [(2, "train", 7.0), (2, "valid", 5.0)] and len(records) == 3
    assert scalars(tmp_path)["loss/iterations/valid"] == [(2, 5.0)]
    assert scalars(tmp_path)["loss/iterations/train"][1:] == [(2, 7.0)]


@pytest.mark.parametrize(("torn", "size"), [("metrics.jsonl", 20), ("events*", 7)])
def test_a_torn_end_of_a_file_is_written_again(tmp_path, torn, size):
    for start, steps in ((0, (1, 2, 3)), (2, (3,))):
        with Tracker(tmp_path, rank=0, start_step=start) as tracker:
            for step in steps:
                log_step(tracker, step)
        if start == 0:
            (file,) = tmp_path.glob(torn)
            file.write_bytes(file.read_bytes()[:-size])
    assert [record["step"] for record in strict_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path)["loss/iterations/train"]] == [1, 2, 3]


def test_other_ranks_and_no_directory_write_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Tracker(tmp_path / "x", rank=1) as tracker:
        log_step(tracker, 1)
    assert not list(tmp_path.iterdir()) and not caplog.records
    with Tracker(None, rank=0) as tracker:
        log_step(tracker, 1)
    assert "step 1 | loss 1.000" in caplog.text


def test_tensorflow_stays_out_of_the_training_process(tmp_path):
    script = f"""
import sys
from lm_experiments_tools.tracking.tracker import Tracker
with Tracker({str(tmp_path)!r}, rank=0) as tracker:
    tracker.log("train", 1, 1, 1, {{"loss": 1.0}})
print([name for name in ("tensorflow", "horovod", "accelerate", "transformers", "matplotlib") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_save_metrics_is_always_valid_json(tmp_path):
    metrics = {"acc": np.float32(0.5), "t": torch.tensor([1, 2]), "nan": math.nan, "inf": np.float64("inf")}
    metrics |= {"n": np.int64(3), "deep": {"a": (1, {2})}, 5: None, "bf16": torch.tensor(1.5).bfloat16()}
    save_metrics(tmp_path / "metrics.json", metrics)
    loaded = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
    expected = {"acc": 0.5, "t": [1, 2], "nan": None, "inf": None, "n": 3, "deep": {"a": [1, [2]]}}
    assert loaded == {**expected, "5": None, "bf16": 1.5}
    before = (tmp_path / "metrics.json").read_bytes()
    with pytest.raises(RecursionError):
        loop: dict = {}
        loop["self"] = loop
        save_metrics(tmp_path / "metrics.json", loop)
    assert (tmp_path / "metrics.json").read_bytes() == before and to_jsonable(True) is True
