"""Model FLOP utilization (MFU): FLOP/s of training as a fraction of the device's peak.

Matrix products, convolutions and attention of a forward pass are counted, padding included; a multiply-add is two
operations. The backward pass costs twice as much, as if all weights were trained. Recomputation by gradient
checkpointing is not counted (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lm_experiments_tools.attention.kernels.call import force_backend
from lm_experiments_tools.backends.collective import say
from lm_experiments_tools.training.generators import preserved_random_state

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.metrics import LoggingInterval
    from lm_experiments_tools.training.micro_batches import MicroBatch


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


# torch has no formula for its fused attention on a CPU.
_FORMULAS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def count_flops(backend: Backend, inputs: Mapping[str, Any]) -> float:
    """Count the FLOPs of a forward and backward pass over `inputs`, by an extra forward pass; collective."""
    # A forward pass may change buffers, such as a norm's running mean, so they are put back.
    buffers = [(buffer, buffer.clone()) for buffer in backend.model.buffers()]
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with preserved_random_state(), torch.no_grad(), torch.compiler.set_stance("force_eager"), force_backend("blocks"):
        with backend.autocast(), counter:
            backend.model(**inputs)
        for buffer, value in buffers:
            buffer.copy_(value)
    return 3.0 * counter.get_total_flops()


# ---- peak rates of devices in FLOP/s -------------------------------------------------------------------------------
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


def compute_dtype(backend: Backend) -> torch.dtype:
    """Find the dtype in which matrix products are computed under the backend's precision."""
    kind = backend.device.type
    with backend.autocast():
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    floating = (p.dtype for p in backend.unwrap().parameters() if p.is_floating_point())
    return next(floating, torch.float32)


def data_sheet_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of an NVIDIA GPU by its data sheet; None for unlisted devices and dtypes, and under MIG."""
    if device.type != "cuda":
        return None
    is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _listed_peak(torch.cuda.get_device_name(device), "tf32" if is_tf32 else dtype)


def _listed_peak(name: str, dtype: torch.dtype | str) -> float | None:
    name = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for pattern, peaks in _DATA_SHEETS.items():
        if dtype in _DTYPES and "MIG" not in name and re.fullmatch(pattern, name):
            named = dict(zip(_DTYPES, peaks, strict=True))
            # A device without TF32 multiplies in fp32.
            listed = named[dtype] or (named[torch.float32] if dtype == "tf32" else None)
            return listed and listed * 1e12
    return None


def flop_meter(args: TrainerArgs, backend: Backend, interval: LoggingInterval) -> FlopMeter | None:
    """Create the meter of `mfu`; None where the peak is unknown: on a CPU and an unlisted GPU without `--peak_tflops`.

    The peak is rank 0's, because the extra forward pass is collective.
    """
    listed = data_sheet_peak(backend.device, compute_dtype(backend))
    peak = backend.broadcast(args.peak_tflops * 1e12 if args.peak_tflops else listed)
    if peak is None:
        return None
    say(backend, f"mfu: the model's FLOP/s relative to {peak / 1e12:.3g} TFLOP/s")
    return FlopMeter(backend, peak, interval)


class FlopMeter:
    """Measures `mfu` on rank 0: FLOP/s between two log lines, divided by the device's peak.

    Args:
        peak: FLOP/s.
        interval: metrics and times since the last log line; those of a resumed run include seconds before the restart.
    """

    def __init__(self, backend: Backend, peak: float, interval: LoggingInterval) -> None:
        self.flops, self._uncounted, self._per_token = 0.0, interval.seconds, None
        self._backend, self.peak = backend, peak

    def add(self, micro_batches: Sequence[MicroBatch], forward_kwargs: Mapping[str, Any]) -> float:
        """Add the FLOPs of a step's micro-batches to the count; returns the seconds of the extra forward pass.

        The first call runs this pass; collective.
        """
        started = time.perf_counter()
        if self._per_token is None:
            first = micro_batches[0].inputs
            self._per_token = count_flops(self._backend, {**first, **forward_kwargs}) / _num_tokens(first)
        self.flops += self._per_token * sum(_num_tokens(micro_batch.inputs) for micro_batch in micro_batches)
        return time.perf_counter() - started

    def utilization(self, interval: LoggingInterval) -> dict[str, float]:
        """Compute the FLOP utilization over the seconds of `interval`, as {log key: fraction of the peak}.

        The count of FLOPs then starts again at 0.
        """
        seconds, flops = interval.seconds - self._uncounted, self.flops
        self.flops = self._uncounted = 0.0
        if not self._backend.is_main or not flops or seconds <= 0:
            return {}
        return {"mfu": flops / seconds / self.peak}


def _num_tokens(inputs: Mapping[str, Any]) -> int:
    """Positions of inputs and labels, padding too; entries of all tensors where the model has neither."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    named = [tensors[name] for name in ("input_ids", "labels") if name in tensors]
    return max(1, sum(value.numel() for value in named or tensors.values()))
