"""Report versions, devices, compilers and disk space of this machine.

    lmtools doctor
    lmtools doctor --json

The exit code is 0 if training can run here in a single process, otherwise 1. `accelerate test` tries several.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from lm_experiments_tools.files import dump_json, human_bytes
from lm_experiments_tools.tracking.run_directory import describe_environment

_PACKAGE = "lm_experiments_tools"
_BUILD = "lmtools build-horovod"
_PACKAGES = (
    "torch", "transformers", "numpy", "tokenizers", "sentencepiece", "tensorboard", "accelerate", "deepspeed",
    "horovod", "triton", "peft", "bitsandbytes", "datasets", "matplotlib",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """The form of the report."""

    json: bool = False
    """Print everything as one JSON object."""


def run(args: DoctorArgs) -> int:
    """Print a report on this machine; returns 0 if training can run here, otherwise 1."""
    found = _examine()
    print(dump_json(found) if args.json else "\n".join(_report(found)))
    return 0 if found["can train"] else 1


def _examine() -> dict[str, Any]:
    """The report as plain JSON types."""
    lacking, one_process = missing_requirements(), _one_process()
    return {
        "can train": "error" not in one_process and "" not in lacking,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "torch": one_process,
        "horovod": _horovod(),
        "cpu": describe_environment()["cpu"],
        "gpus": _gpus(),
        "compilers": {**_compilers(), "C++ for torch.compile": _why_no_cpp() or "works"},
        "space": _space(),
        "missing": {extra: {"packages": names, "install": _remedy(extra)} for extra, names in lacking.items()},
    }


def _one_process() -> dict[str, Any]:
    """Run one optimizer step on the default device; returns facts about torch, or the error."""
    try:
        import torch

        from lm_experiments_tools.backends.backend import LocalBackend
        from lm_experiments_tools.modules.devices import has_bf16

        backend, model = LocalBackend(), torch.nn.Linear(8, 8)
        backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        backend.backward(backend.model(torch.ones(2, 8, device=backend.device)).square().sum())
        backend.clip_and_step().result()
    except (ImportError, OSError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    facts = {"device": str(backend.device), "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    return facts | {"cpu capability": torch.backends.cpu.get_cpu_capability(), "cpu bf16": has_bf16("cpu")}


def _horovod() -> str:
    """Whether Horovod is compiled for this torch."""
    try:
        importlib.import_module("horovod.torch")
    except (ImportError, OSError) as error:
        return f"not there ({error}); build it by: {_BUILD}"
    return "works"


def _report(found: Mapping[str, Any]) -> list[str]:
    """The lines of a terminal."""
    versions = " | ".join(f"{name} {version or '-'}" for name, version in found["versions"].items())
    lines = ["versions", *textwrap.wrap(versions, 100, initial_indent="  ", subsequent_indent="  ")]
    cpu, torch = found["cpu"], found["torch"]
    lines += ["", "backends", f"  one process  {torch.get('error', 'works')}", f"  horovod      {found['horovod']}"]
    lines += ["  others       try them by: accelerate test"]
    lines += [
        "",
        "devices",
        f"  cpu  {cpu['model']}, {cpu['count']} cores, {torch.get('threads', '?')} threads of torch",
    ]
    lines += [
        f"       {'bf16 units' if torch.get('cpu bf16') else 'no bf16 units'}; {torch.get('cpu capability', '?')}"
    ]
    lines += [
        f"  gpu  {gpu['name']}, {gpu['memory.free']} free of {gpu['memory.total']}, driver {gpu['driver_version']}"
        for gpu in found["gpus"]
    ] or ["  gpu  none (nvidia-smi)"]
    lines += [f"  torch takes {torch.get('device', '?')}; built for CUDA {torch.get('cuda') or 'none'}"]
    for title in ("compilers", "space"):
        lines += ["", title, *(f"  {name:<22} {text or '-'}" for name, text in found[title].items())]
    if found["missing"]:
        lines += ["", "to install"]
    for extra, lacking in found["missing"].items():
        lines.append(f"  {extra or 'needed':<12} {', '.join(lacking['packages'])}: {lacking['install']}")
    return [*lines, "", f"training {'can' if found['can train'] else 'cannot'} run here"]


def missing_requirements() -> dict[str, list[str]]:
    """Return the missing or outdated requirements of each extra (`pip install lm_experiments_tools[EXTRA]`).

    The key "" has the requirements of the package itself.
    """
    found: dict[str, list[str]] = {}
    try:
        lines = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone
        return found
    for line in lines:
        requirement, named = Requirement(line), re.search(r'extra == "([^"]+)"', line)
        extra = named[1] if named else ""
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        installed = _version(requirement.name)
        is_there = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        if applies and extra not in ("dev", "all") and not is_there:
            found.setdefault(extra, []).append(line.partition(";")[0].strip())
    return found


def _remedy(extra: str) -> str:
    """The command that installs an extra; Horovod is built after that."""
    folder = Path(__file__).resolve().parents[2]
    source, option = (str(folder), "-e ") if (folder / "setup.py").is_file() else (_PACKAGE, "")
    command = f'pip install {option}"{source}{f"[{extra}]" if extra else ""}"'
    return f"{command} && {_BUILD}" if extra == "horovod" else command


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU; empty without one."""
    fields = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")
    output = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _compilers() -> dict[str, str | None]:
    """{program: the line with its version, None if it is missing}."""
    outputs = {program: _output([program, "--version"]) for program in ("g++", "nvcc", "mpirun", "cmake")}
    return {
        program: next((line for line in output.splitlines() if re.search(r"\d+\.\d+", line)), None)
        for program, output in outputs.items()
    }


def _why_no_cpp() -> str | None:
    """Why torch.compile cannot build C++ for the CPU here; None if it can: Python.h and OpenMP are tried."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return "there is no g++ (Debian: apt install g++)"
    source = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
    command = [compiler, "-x", "c++", "-", "-fopenmp", "-fsyntax-only", f"-I{sysconfig.get_path('include')}"]
    built = subprocess.run(command, input=source, capture_output=True, text=True)
    errors = [line for line in built.stderr.splitlines() if "error" in line]
    return None if built.returncode == 0 else f"g++ fails: {errors[0] if errors else built.stderr[:200]}"


def _space() -> dict[str, str]:
    """Free memory, shared memory (of data workers), and disk here and for temporary files."""
    memory = psutil.virtual_memory()
    free = {"memory": f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}"}
    for name, path in (("shared memory", "/dev/shm"), ("disk here", "."), ("temporary files", tempfile.gettempdir())):
        if os.path.isdir(path):
            disk = shutil.disk_usage(path)
            free[name] = f"{human_bytes(disk.free)} free of {human_bytes(disk.total)}"
    return free


def _output(command: list[str]) -> str:
    """Output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
