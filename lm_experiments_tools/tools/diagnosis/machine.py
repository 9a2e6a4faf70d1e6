"""Versions, processor, GPUs, compilers, memory and disk of this machine, and what is missing for which extra.

Nothing heavy is imported: versions are read from the installed packages' metadata.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from lm_experiments_tools.files import human_bytes

PACKAGE = "lm_experiments_tools"
_ALWAYS_SHOWN = (
    "torch", "transformers", "numpy", "tokenizers", "sentencepiece", "tensorboard", "accelerate", "deepspeed",
    "horovod", "triton", "peft", "bitsandbytes", "datasets", "matplotlib",
)  # fmt: skip
_CPU_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "bf16", "sve")
_BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
_SECONDS = 10  # for a program that prints its version


def versions() -> dict[str, str | None]:
    """{package: version, None if it is not installed}, Python first."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _ALWAYS_SHOWN}}


def missing() -> dict[str, list[str]]:
    """{extra: requirements of it that are not installed or too old}; "" is what every use needs."""
    found: dict[str, list[str]] = {}
    try:
        lines = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone
        return found
    for line in lines:
        requirement, named = Requirement(line), re.search(r'extra == "([^"]+)"', line)
        extra = named[1] if named else ""
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and extra not in ("dev", "all") and not _is_satisfied(requirement):
            found.setdefault(extra, []).append(line.partition(";")[0].strip())
    return found


def remedy(extra: str) -> str:
    """The command that installs an extra."""
    folder = Path(__file__).resolve().parents[3]
    source, option = (str(folder), "-e ") if (folder / "setup.py").is_file() else (PACKAGE, "")
    return f'pip install {option}"{source}{f"[{extra}]" if extra else ""}"'


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_satisfied(requirement: Requirement) -> bool:
    installed = _version(requirement.name)
    return installed is not None and requirement.specifier.contains(installed, prereleases=True)


def cpu() -> dict[str, object]:
    """Model, cores, those this process may use, and units for small number formats."""
    model, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return {
        "model": model,
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "units": [unit for unit in _CPU_UNITS if unit in flags],
        "bf16": bool(flags & _BF16_UNITS),
    }


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU; empty without one."""
    fields = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")
    said = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def compilers() -> dict[str, str | None]:
    """{program: the line with its version, None if it is missing}."""
    found = {}
    for program in ("g++", "nvcc", "mpirun", "cmake"):
        lines = (_output([program, "--version"]) or "").splitlines()
        found[program] = next((line for line in lines if re.search(r"\d+\.\d+", line)), None)
    return found


def builds_cpp() -> str | None:
    """Why torch.compile cannot build C++ for the CPU here; None if it can: Python.h and OpenMP are tried."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return "there is no g++ (Debian: apt install g++)"
    source = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-x", "c++", "-", "-fopenmp", "-fsyntax-only", f"-I{sysconfig.get_path('include')}"]
        try:
            built = subprocess.run(command, input=source, capture_output=True, text=True, cwd=folder, timeout=30)
        except subprocess.TimeoutExpired:
            return "g++ did not end within 30 s"
    errors = [line for line in built.stderr.splitlines() if "error" in line]
    return None if built.returncode == 0 else f"g++ fails: {errors[0] if errors else built.stderr[:200]}"


def space() -> dict[str, str]:
    """Free memory, shared memory (of data workers), and disk here and for temporary files."""
    memory = psutil.virtual_memory()
    free = {"memory": f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}"}
    for name, path in (("shared memory", "/dev/shm"), ("disk here", "."), ("temporary files", tempfile.gettempdir())):
        if os.path.isdir(path):
            disk = shutil.disk_usage(path)
            free[name] = f"{human_bytes(disk.free)} free of {human_bytes(disk.total)}"
    return free


def _output(command: list[str]) -> str | None:
    """Output of a program; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
