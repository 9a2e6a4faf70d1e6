"""Kernels of a trace of torch.profiler (Chrome's JSON): time by kind, gaps between them, waits of the host; logs."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

Event = dict[str, Any]
# The first pattern that a kernel's name contains decides its kind. Inductor names a kernel after the operations in it.
KINDS = {
    "attention, forward": r"^forward_kernel",
    "attention, dq and bias": r"^query_gradient_kernel",
    "attention, dk and dv": r"^key_gradient_kernel",
    "cross-attention": r"flash|fmha|cudnn|mha|scaled_dot_product",
    "products": r"nvjet|gemm|cutlass|cublas|xmma|splitK|aten::(addmm|mm|bmm|linear)$",
    "GeGLU": r"triton_.*(gelu|tanh)",
    "norms": r"triton_(per|red)",
    "other compiled": r"^triton_|CompiledFunction|^graph_|^cpp_fused",
    "optimizer": r"^_kernel|adam",
    "gradient norm": r"multi_tensor|foreach|lpnorm|_norm",
    "embedding": r"embedding|radix|sort|scatter|thrust|cub::|index",
    "copies": r"memcpy|memset|copy",
    "other": "",
}
_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"
# Calls of the CUDA runtime in which the host waits for the whole queue. cudaEventSynchronize is none of them: the loop
# reads the result of the step before while the next one is queued.
_BLOCKING = re.compile(r"cuda(Stream|Device)Synchronize|cudaMemcpy$|cudaFree$|cudaMalloc$")


def read_trace(path: Path) -> list[Event]:
    return json.loads(path.read_text())["traceEvents"]


def profiler_of(device: str) -> torch.profiler.profile:
    """Profiler of CUDA kernels and of the calls that launch them; on a CPU, of operators."""
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU])


def kernels_in(profiler: torch.profiler.profile) -> list[Event]:
    """Kernels of a profiler that has stopped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return kernels_of(read_trace(path))


def kernels_of(trace: list[Event]) -> list[Event]:
    """Kernels and copies on the device. Without any, operators of a CPU stand in, the nested ones too, for a trial."""
    found = [event for event in trace if event.get("cat") in _DEVICE]
    return found or [event for event in trace if event.get("cat") == "cpu_op"]


def by_kind(kernels: list[Event], steps: int = 1) -> dict[str, tuple[float, float]]:
    """(milliseconds, launches) a step of each kind that occurs, the costliest first."""
    table: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for event in kernels:
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event["name"], re.IGNORECASE))
        took, launches = table[kind]
        table[kind] = took + event["dur"] / 1e3 / steps, launches + 1 / steps
    return dict(sorted(table.items(), key=lambda item: -item[1][0]))


def idle_share(kernels: list[Event]) -> float:
    """Share of the time between the first and the last kernel in which the device computes nothing."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:  # streams overlap
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    return 1 - busy / (until - spans[0][0])


def waits_of(trace: list[Event]) -> list[str]:
    """Names of the calls, between the first and the last launch, in which the host waits for the whole queue."""
    calls = [event for event in trace if event.get("cat") == "cuda_runtime"]
    launches = [event["ts"] for event in calls if "LaunchKernel" in event["name"]]
    # The trace ends with a synchronization of its own.
    begin, end = min(launches, default=0), max(launches, default=0)
    return [event["name"] for event in calls if _BLOCKING.search(event["name"]) and begin < event["ts"] < end]


def last_line(text: str) -> str:
    """The last line that says something, as of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
