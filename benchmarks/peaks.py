"""Peak FLOP/s of a device: of its data sheet, or measured."""

import time

import torch

from lm_experiments_tools.modules.devices import synchronize

_SHAPES = ((64, 512, 512), (2048, 512, 512))  # rows, in, out of a linear layer: small products are a CPU's fastest
_SHAPES_ON_GPU = ((65536, 512, 1024), (8192, 8192, 8192))
_SECONDS, _PRODUCTS = 0.1, 60  # for each shape, after the first product


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure a device's peak FLOP/s: the speed of the fastest of many matrix products. Draws no random numbers."""
    shapes = _SHAPES if device.type == "cpu" else _SHAPES_ON_GPU
    return max(_rate(device, kind, *shape) for kind in {dtype, torch.float32} for shape in shapes)


def _rate(device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    x = torch.arange(rows * inputs, device=device).sin().to(dtype).view(rows, inputs)
    weight = torch.arange(inputs * outputs, device=device).sin().to(dtype).view(outputs, inputs)
    x @ weight.T  # loads libraries
    fastest, end = float("inf"), time.perf_counter() + _SECONDS
    for _ in range(_PRODUCTS):
        synchronize(device)
        started = time.perf_counter()
        x @ weight.T
        synchronize(device)
        fastest = min(fastest, max(time.perf_counter() - started, 1e-9))
        if time.perf_counter() > end:
            break
    return 2 * rows * inputs * outputs / fastest
