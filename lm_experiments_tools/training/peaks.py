"""Peak rates of devices in FLOP/s: from NVIDIA's data sheets, otherwise measured."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

_DTYPES = (torch.bfloat16, torch.float16, "tf32", torch.float32)
# Dense TFLOP/s with accumulation in fp32, by a pattern of torch.cuda.get_device_name. Sources: NVIDIA's data sheets of
# each product, which give rates with sparsity from the A100 on (halved here); for GeForce the whitepapers "Ampere
# GA102" (appendix A) and "Ada GPU architecture" (appendix A).
_DATA_SHEETS: dict[str, tuple[float | None, float, float | None, float]] = {
    # name              bf16   fp16   tf32   fp32
    r"V100-SXM\d.*": (None, 125, None, 15.7),
    r"V100-PCIE.*": (None, 112, None, 14),
    r"T4": (None, 65, None, 8.1),
    r"A100.*": (312, 312, 156, 19.5),
    r"A10": (125, 125, 62.5, 31.2),
    r"L4": (121, 121, 60, 30.3),
    r"L40S": (362, 362, 183, 91.6),
    r"GeForce RTX 3090": (71, 71, 35.6, 35.6),
    r"GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
    r"H100 PCIe": (756, 756, 378, 51),
    r"H100 NVL": (835, 835, 417, 60),
    r"H100 80GB HBM3": (989, 989, 494, 67),
    r"H200": (989, 989, 494, 67),
    r"GH200 .*": (990, 990, 494, 67),
    r"B200": (2250, 2250, 1100, 75),
}
_SHAPES = ((64, 512, 512), (2048, 512, 512))  # rows, in, out of a linear layer: small products are a CPU's fastest
_SHAPES_ON_GPU = ((65536, 512, 1024), (8192, 8192, 8192))
_SECONDS, _PRODUCTS = 0.1, 60  # for each shape, after the first product


def compute_dtype(backend: Backend) -> torch.dtype:
    """The dtype that matrix products are computed in."""
    kind = backend.device.type
    with backend.autocast():
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    floating = (p.dtype for p in backend.unwrap().parameters() if p.is_floating_point())
    return next(floating, torch.float32)


def data_sheet_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak of a known NVIDIA GPU in FLOP/s; None for other devices, for parts of a GPU (MIG) and unlisted
    dtypes."""
    if device.type != "cuda":
        return None
    is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _listed_peak(torch.cuda.get_device_name(device), "tf32" if is_tf32 else dtype)


def _listed_peak(name: str, dtype: torch.dtype | str) -> float | None:
    name = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for pattern, peaks in _DATA_SHEETS.items():
        if dtype in _DTYPES and "MIG" not in name and re.fullmatch(pattern, name):
            named = dict(zip(_DTYPES, peaks, strict=True))
            listed = named[dtype] or (named[torch.float32] if dtype == "tf32" else None)  # without TF32 it is fp32
            return listed and listed * 1e12
    return None


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of many matrix products, in fp32 too, which may be faster; draws no random numbers."""
    shapes = _SHAPES if device.type == "cpu" else _SHAPES_ON_GPU
    return max(_rate(device, kind, *shape) for kind in {dtype, torch.float32} for shape in shapes)


def _rate(device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    x = torch.arange(rows * inputs, device=device).sin().to(dtype).view(rows, inputs)
    weight = torch.arange(inputs * outputs, device=device).sin().to(dtype).view(outputs, inputs)
    x @ weight.T  # loads libraries
    fastest, end = float("inf"), time.perf_counter() + _SECONDS
    for _ in range(_PRODUCTS):
        _wait(device)
        started = time.perf_counter()
        x @ weight.T
        _wait(device)
        fastest = min(fastest, max(time.perf_counter() - started, 1e-9))
        if time.perf_counter() > end:
            break
    return 2 * rows * inputs * outputs / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
