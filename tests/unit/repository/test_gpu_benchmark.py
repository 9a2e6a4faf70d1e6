"""benchmarks/gpu.py without a GPU: the cases of a lease and their time, traces, checkouts that are not there."""

import subprocess
import sys
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import ROOT


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's modules of cases and traces."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_cases
    import gpu_trace

    return SimpleNamespace(cases=gpu_cases, trace=gpu_trace)


@pytest.mark.parametrize(("memory", "most"), [(139, 800), (80, 880)])
def test_a_lease_takes_fifteen_minutes_and_begins_with_the_step_of_the_goal(modules, monkeypatch, memory, most):
    card = SimpleNamespace(total_memory=memory << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(modules.cases, "lacks", lambda *packages: None)
    common = {"device": "cuda", "output": "none", "tiny_t5": "none", "nanot5": "there", "before": "there"}
    cases = list(modules.cases.lease_cases(common, False, 8))
    assert cases == modules.cases.all_cases(common, False)[: len(cases)]
    # Cases that measure no time run next to each other.
    waves = [[case.seconds for case in wave] for alone, wave in groupby(cases, lambda case: case.alone) if not alone]
    seconds = sum(case.seconds for case in cases if case.alone) + sum(map(max, waves))
    assert 600 < seconds < most  # of 900: the rest starts the machine
    assert [case.part for case in cases[:3]] == ["environment", "kernels", "step"]
    assert cases[2].name.startswith("t5-v1_1-base, 128 x 512/114, bf16: ours; ours, before")
    assert sum(case.seconds for case in cases[:3]) < 240


def test_a_trace_gives_kernels_by_kind_idle_time_and_waits(modules):
    def kernel(name, begin, took):
        return {"cat": "kernel", "name": name, "ts": begin, "dur": took}

    def call(name, begin):
        return {"cat": "cuda_runtime", "name": name, "ts": begin, "dur": 1}

    trace = [
        kernel("query_gradient_kernel", 100, 1000), kernel("nvjet_tst_128x256", 1000, 600),  # 100 us overlap
        kernel("triton_poi_fused_gelu_mul_2", 2000, 400), kernel("triton_red_fused_pow_mean_0", 2400, 100),
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 2500, "dur": 100}, kernel("_kernel", 2600, 100),
        call("cudaLaunchKernel", 10), call("cudaStreamSynchronize", 20), call("cudaEventSynchronize", 30),
        call("cuLaunchKernelEx", 40), call("cudaDeviceSynchronize", 50), {"cat": "cpu_op", "name": "aten::mm"},
    ]  # fmt: skip
    kernels = modules.trace.kernels_of(trace)
    assert modules.trace.by_kind(kernels, steps=2) == {
        "attention, dq and bias": (0.5, 0.5), "products": (0.3, 0.5), "GeGLU": (0.2, 0.5), "norms": (0.05, 0.5),
        "copies": (0.05, 0.5), "optimizer": (0.05, 0.5),
    }  # fmt: skip
    # Busy from 100 to 1600 and from 2000 to 2700, of 2600 us.
    assert modules.trace.idle_share(kernels) == pytest.approx(400 / 2600)
    assert modules.trace.waits_of(trace) == ["cudaStreamSynchronize"]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--nanot5", "--before"])
def test_a_folder_that_is_no_checkout_is_refused_before_anything_runs(tmp_path, flag):
    command = [sys.executable, "benchmarks/gpu.py", "--output", str(tmp_path / "out"), flag, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"{flag} {tmp_path} is no checkout" in done.stderr
    assert not (tmp_path / "out").exists()
