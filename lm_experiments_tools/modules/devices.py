"""Main memory, alignment and asynchronous reads of tensors, embeddings on the CPU, where bfloat16 and Triton run."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

TRITON_CAPABILITY = 8, 0  # oldest compute capability that Triton supports
ALIGNMENT = 64  # bytes; torch allocates at multiples of it, but safetensors files and slices of a batch do not
_CGROUPS = Path("/sys/fs/cgroup")  # of this container; of a process elsewhere, below


def available_memory() -> int:
    """Return the bytes of main memory that are free or can be freed, at most the memory limit of the container."""
    return min([psutil.virtual_memory().available, *_limits()])


def total_memory() -> int:
    """Return the bytes of main memory, at most the memory limit of the container."""
    return min([psutil.virtual_memory().total, *_limits()])


def _limits() -> Iterator[int]:
    groups = [line.partition(":")[2].partition(":") for line in _read(Path("/proc/self/cgroup")).splitlines()]
    for controllers, _, path in [("", "", "/"), ("memory", "", "/"), *groups]:
        if controllers in ("", "memory"):
            folder = _CGROUPS / controllers / path.lstrip("/")
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (limit := _read(folder / name).strip()).isdigit():
                    yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or another version of its groups
        return ""


def aligned(tensor: Tensor) -> Tensor:
    """Copy a floating-point tensor to an aligned memory address, if it is not at one already.

    The rounding of MKL (the CPU's matrix library) depends on the address, so this makes results reproducible.
    """
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT else tensor


def align_model(model: nn.Module) -> None:
    """Move a model's parameters and buffers to aligned memory addresses, so that equal weights give equal results."""
    for tensor in chain(model.parameters(), model.buffers()):
        if type(tensor.data) is torch.Tensor:  # not a shard (DTensor)
            tensor.data = aligned(tensor.data)


class HostEmbedding(nn.Embedding):
    """Embedding that stays in main memory when its model moves to a GPU, to save GPU memory.

    Its outputs are copied to the inputs' device.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> HostEmbedding:
        return self

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.device)).to(input.device)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a GPU, for example before reading a clock; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_process_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    # The kernel reports KiB, except on macOS, where it reports bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory_mib(device: torch.device) -> float:
    """This worker's largest memory so far, MiB: of tensors on its GPU, or of the whole process on a CPU."""
    return (torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_process_bytes()) / 2**20


def read_later(value: Tensor) -> Callable[[], float | bool | list]:
    """Start copying a tensor from a GPU to the host; returns a function that waits for it and gives its value."""
    copy = value.detach().to("cpu", non_blocking=value.device.type in ("cpu", "cuda"))
    if value.device.type != "cuda":
        return copy.tolist
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(value.device))

    def read() -> float | bool | list:
        event.synchronize()
        return copy.tolist()

    return read


@cache
def has_bf16(device: str) -> bool:
    """True if bfloat16 products are faster than float32's on this machine's devices of a type ("cpu", "cuda").

    On a CPU the limits that ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA set count as its hardware.
    """
    if device == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    if device != "cpu" or "AVX512" not in torch.backends.cpu.get_cpu_capability() or not supports_bf16_on_cpu():
        return False
    return any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def supports_bf16_on_cpu() -> bool:
    """True if the CPU's matrix library computes in bfloat16, be it slowly."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


# ---- Triton ---------------------------------------------------------------------------------------------------------
class Card(NamedTuple):
    """Properties of an NVIDIA GPU that decide whether and how Triton's kernels run."""

    name: str
    capability: tuple[int, int]
    shared_memory: int  # bytes that a program may have


@lru_cache(maxsize=64)
def card_of(device: torch.device) -> Card | None:
    """Properties of an NVIDIA GPU; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, (properties.major, properties.minor), properties.shared_memory_per_block_optin)


@cache
def lacks_triton() -> str | None:
    """Name what Triton lacks on this machine; None if Triton runs."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        return "Triton finds no C compiler (install gcc, or set CC)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python.h (install python3-dev)"
    return None


@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """True if this package's Triton kernels run on a device."""
    if device.type != "cuda" or lacks_triton():
        return False
    card = card_of(device)
    return card is None or card.capability >= TRITON_CAPABILITY
