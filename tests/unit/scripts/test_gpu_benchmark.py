"""benchmarks/gpu.py without a GPU: every part leaves rows, a second call repeats none, crashes cost one row."""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import ROOT


def tiny(folder, parts, *more):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--output", str(folder), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, "--parts", parts, *more], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def check_parts(folder, parts):
    """Run the parts, run them again, write the page."""
    assert "nothing is left" in tiny(folder, parts)
    rows = rows_of(folder)
    assert {row["part"] for row in rows if "name" in row} == set(parts.split(","))
    assert [row for row in rows if "error" in row] == []
    assert "nothing is left" in tiny(folder, parts)
    assert rows_of(folder) == rows
    page = folder / "page.md"
    tiny(folder, parts, "--report", str(page))
    return {row["name"]: row for row in rows if "name" in row}, page.read_text()


@pytest.mark.slow
def test_every_part_without_training_leaves_rows_and_resumes(tmp_path):
    found, page = check_parts(tmp_path, "environment,attention,pytest,memory,tiles,launchers")
    assert found["triton"]["skipped"] == found["Horovod with NCCL"]["skipped"] == "needs CUDA"
    errors = [row for row in rows_of(tmp_path) if "gradient_error" in row]
    assert {row["name"] for row in errors} == {"sdpa", "sdpa, dropout"}
    assert all(max(row["output_error"], row["gradient_error"]) < 1e-2 for row in errors)  # of bf16, next to float64
    memory = next(row for name, row in found.items() if name.startswith("pretrain-t5"))
    assert memory["predicted"] == pytest.approx(memory["allocated"], rel=0.08)
    assert page.count("Not measured yet.") == 2 and "| dense, 64 tokens | sdpa |" in page


@pytest.mark.slow
def test_training_parts_leave_rows_and_resume(tmp_path):
    found, page = check_parts(tmp_path, "step,loop")
    assert found["ours, not compiled"]["tokens_per_second"] > 0 and "--nanot5" in found["nanoT5"]["skipped"]
    assert found["resume, --reproducible fixed"]["result"] == "same bits"
    assert page.count("Not measured yet.") == 6


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def crash_once(settings, emit):
    for name in "first", "second", "third":
        if name not in settings["skip"]:
            emit({"begin": name})
            if name == "second":
                os.kill(os.getpid(), signal.SIGKILL)
            emit({"name": name, "ms": 1.0})


@pytest.fixture
def options(tmp_path):
    (tmp_path / "logs").mkdir()
    return argparse.Namespace(device="cpu", output=tmp_path, budget_s=60.0, jobs=2)


def test_a_crash_costs_the_measurement_in_which_it_happened(gpu, options, tmp_path):
    results = gpu.Results(tmp_path / "results.jsonl")
    assert gpu.run([gpu.Case("attention", "case", crash_once, {}, 1)], options, results) == []
    rows = [row for row in rows_of(tmp_path) if "name" in row]
    assert {row["name"] for row in rows} == {"first", "second", "third"}
    assert [row["name"] for row in rows if "error" in row] == ["second"]
