"""Report versions and devices of this machine.

    lmtools doctor

The exit code is 0 if training can run here in a single process, otherwise 1. `accelerate test` tries several.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import subprocess
import textwrap
from dataclasses import dataclass

from lm_experiments_tools.tracking.run_directory import describe_environment

_BUILD = "lmtools build-horovod"
_PACKAGES = (
    "torch", "transformers", "numpy", "tokenizers", "sentencepiece", "tensorboard", "accelerate", "deepspeed",
    "horovod", "triton", "peft", "bitsandbytes", "datasets", "matplotlib",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """The report has no settings."""


def run(args: DoctorArgs) -> int:
    """Print a report on this machine; returns 0 if training can run here, otherwise 1."""
    trains, one_process = _one_process()
    found = {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    versions = " | ".join(f"{name} {version or '-'}" for name, version in found.items())
    cpu = describe_environment()["cpu"]
    print("\n".join(["versions", *textwrap.wrap(versions, 100, initial_indent="  ", subsequent_indent="  ")]))
    print(f"one update   {one_process}\nhorovod      {_horovod()}\ncpu          {cpu['model']}, {cpu['count']} cores")
    print(f"gpus         {_gpus() or 'none (nvidia-smi)'}")
    print(f"training {'can' if trains else 'cannot'} run here")
    return 0 if trains else 1


def _one_process() -> tuple[bool, str]:
    """Run one optimizer step on the default device; returns whether it works, and facts about torch or the error."""
    try:
        import torch

        from lm_experiments_tools.backends.backend import LocalBackend
        from lm_experiments_tools.modules.devices import has_bf16

        backend, model = LocalBackend(), torch.nn.Linear(8, 8)
        backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        backend.backward(backend.model(torch.ones(2, 8, device=backend.device)).square().sum())
        backend.clip_and_step().result()
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"{type(error).__name__}: {error}"
    bf16 = "bf16" if has_bf16(backend.device.type) else "no bf16"
    return True, f"works on {backend.device}, {bf16}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda}"


def _horovod() -> str:
    """Whether Horovod is compiled for this torch."""
    try:
        importlib.import_module("horovod.torch")
    except (ImportError, OSError) as error:
        return f"not there ({error}); build it by: {_BUILD}"
    return "works"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> str:
    """Name, memory and driver of each NVIDIA GPU; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
