"""benchmarks/gpu.py without a GPU: every part leaves rows, a second call repeats none, crashes cost one row."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

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


def never_end(settings, emit):
    emit({"name": "early", "ms": 1.0})
    time.sleep(600)


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


def test_a_case_cut_short_keeps_its_rows_and_is_begun_again(gpu, options, tmp_path):
    options.budget_s = gpu.MARGIN + 2.0
    case = gpu.Case("attention", "case", never_end, {}, 1)
    started = time.monotonic()
    left = gpu.run([case], options, gpu.Results(tmp_path / "results.jsonl"))
    assert left == [case] and time.monotonic() - started < gpu.MARGIN
    rows = rows_of(tmp_path)
    assert [row.get("name") or row["status"] for row in rows] == ["started", "early", "interrupted"]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "atten')  # the machine was taken away while it wrote
    results = gpu.Results(tmp_path / "results.jsonl")
    assert results.rows == rows and not results.is_finished(case)


def test_loops_are_grouped_by_the_memory_of_the_device(gpu):
    from gpu_cases import T5_LOOPS, groups_of
    from step import Shape

    shape = Shape("t5-v1_1-base", 128, 512, 114)
    groups = groups_of(T5_LOOPS, shape, 130_000)
    assert len(groups) > 1 and all(group[0] == "ours" for group in groups)
    assert sorted(loop for group in groups for loop in group[1:]) == sorted(T5_LOOPS[1:])
    assert groups_of(T5_LOOPS, shape, float("inf")) == [T5_LOOPS]


def test_parts_whose_packages_are_not_installed_are_skipped_with_the_reason(gpu, monkeypatch):
    import gpu_cases

    absent = "sentencepiece is not installed"
    monkeypatch.setattr(gpu_cases, "lacks", lambda *names: absent if "sentencepiece" in names else None)
    cases = gpu_cases.all_cases({"device": "cpu", "output": "out", "tiny_t5": "tiny.json", "nanot5": None}, tiny=True)
    found = {case.part: case for case in cases}
    for part in ("memory", "loop", "launchers"):
        rows = []
        found[part].run(found[part].settings, rows.append)
        assert rows[0]["skipped"] == absent and rows[0]["name"]
    assert found["attention"].run is not gpu_cases.skipped
