"""Floating point operations of a training step, and the share of the device's peak that they are (MFU).

Counted are matrix products, a multiply-add as two, with all tokens of a row, padding too; the backward pass has twice
the forward pass's, and what gradient checkpointing computes again is not counted (Chowdhery et al. 2022, arXiv
2204.02311, appendix B). Six times the parameters would be wrong for an encoder-decoder, each half of which sees its
own tokens alone. Packed rows are whole rows too: the matrix of scores is dense, with examples masked from each other.

Where no formula is known, torch counts the passes of the first micro-batch, on tensors without data.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.training.metrics import Window

_HOMES = ("transformers", "modeling_t5", "modeling_bert")
_VARIANTS = ("sparse_config_cls", "num_cdq_heads", "num_memory_tokens")
_POSITIONS = ("absolute", "relative_attention_bias", "rotary", "alibi", "none")
# Whatever the code of a model says when it meets tensors without data, or cannot be copied.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
_SECONDS, _PRODUCTS = 0.2, 60  # that the peak is measured for at most, beside the first product


def t5_flops(config: PreTrainedConfig, rows: int, inputs: int, targets: int) -> float:
    """FLOP of T5ForConditionalGeneration, forward and backward; `inputs` and `targets` are tokens of a row."""
    width, inner = config.d_model, config.num_heads * config.d_kv
    feed_forward = (3 if config.is_gated_act else 2) * width * config.d_ff
    encoder = inputs * (4 * width * inner + feed_forward) + 2 * inputs * inputs * inner
    decoder = targets * (6 * width * inner + feed_forward) + 2 * inputs * width * inner
    decoder += 2 * targets * (targets + inputs) * inner
    layers = config.num_layers * encoder + config.num_decoder_layers * decoder
    return 6.0 * rows * (layers + targets * width * config.vocab_size)


def bert_flops(config: PreTrainedConfig, rows: int, inputs: int, scored: int, pooled: bool = False) -> float:
    """FLOP of a forward and a backward pass of BertForMaskedLM, or BertForPreTraining (`pooled`).

    Args:
        inputs: tokens of a row.
        scored: tokens, of all rows together, that the head gives words scores for.
    """
    width, inner = config.hidden_size, config.intermediate_size
    layer = inputs * (4 * width * width + 2 * width * inner) + 2 * inputs * inputs * width
    head = scored * width * (width + config.vocab_size) + pooled * rows * width * (width + 2)
    return 6.0 * (rows * config.num_hidden_layers * layer + head)


def counter(model: nn.Module) -> Callable[[dict[str, Any]], float] | str:
    """The FLOP of training on a micro-batch, as a function of the model's arguments; or why they are not known."""
    cls = next(
        (cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.")), type(model)
    )  # of FSDP's
    name, config = cls.__name__, getattr(model, "config", None)
    if cls.__module__.partition(".")[0] not in _HOMES:
        return f"no formula is known for {name}"
    variants = [key for key in _VARIANTS if getattr(config, key, None)]
    layers = (getattr(config, f"{kind}_layer", "") for kind in ("encoder_self_attention", "decoder_self_attention"))
    if variants or any("T5Attention" not in layer for layer in layers if layer):
        return f"no formula is known for {name} with {' '.join(variants) or 'attention layers of another class'}"
    if getattr(config, "position_embedding_type", None) not in (None, *_POSITIONS):
        return f"no formula is known for {name} with position_embedding_type {config.position_embedding_type}"
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return "some of the model's parameters are not trained"
    if name == "T5ForConditionalGeneration":
        return lambda inputs: t5_flops(config, *inputs["input_ids"].shape, inputs["labels"].shape[1])
    if name in ("BertForMaskedLM", "BertForPreTraining"):
        pooled = name == "BertForPreTraining"
        return lambda inputs: bert_flops(config, *inputs["input_ids"].shape, inputs["labels"].numel(), pooled)
    return f"no formula is known for {name}"


def copied(model: nn.Module) -> nn.Module:
    """The model with tensors that have no data, in which gradient checkpointing is off. Raises one of `_FAILURES`."""
    if any(hasattr(p, "to_local") or hasattr(p, "ds_id") for p in model.parameters()):
        raise ValueError("its parameters are divided among the workers")
    whole: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        whole[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    made = copy.deepcopy(model, whole)
    for module in made.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    return made


def counted_flops(model: nn.Module, args: tuple, inputs: dict[str, Any]) -> float:
    """FLOP of a forward and a backward pass of what `copied` made, as torch counts. Raises one of `_FAILURES`."""

    def emptied(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    looked_at = ("attention_mask", "decoder_attention_mask")  # by transformers; the dense product is as large without
    kept = {name: emptied(value) for name, value in inputs.items() if name not in looked_at}
    with torch.enable_grad(), FlopCounterMode(display=False) as count:
        outputs = model(*map(emptied, args), **kept)
        values = (
            outputs.values() if hasattr(outputs, "values") else outputs if isinstance(outputs, tuple) else [outputs]
        )
        loss = next(value for value in values if isinstance(value, Tensor) and value.requires_grad)
        loss.sum().backward()
    return float(count.get_total_flops())


@cache
def measured_peak(device: torch.device, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of the best of many products of 512 and 1024 columns, a layer's; draws no random numbers."""
    rows = 2048 if device.type == "cpu" else 65536
    a, b = (torch.arange(n * 512, device=device).sin().to(dtype) for n in (rows, 1024))
    a, b = a.view(rows, 512), b.view(512, 1024)
    a @ b  # loads libraries
    best, end = 0.0, clock() + _SECONDS
    for _ in range(_PRODUCTS):
        _wait(device)
        start = clock()
        a @ b
        _wait(device)
        best = max(best, 2 * rows * 512 * 1024 / max(clock() - start, 1e-9))
        if clock() > end:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class FlopMeter:
    """FLOP of rank 0's training passes since the last log line, by the shapes of what its model is called with.

    Args:
        window: sums of a resumed run, of whose seconds this process has counted nothing.
        peak_tflops: of one device, 10^12 FLOP/s; None: measured.
        say: logs why there is nothing to count.
    """

    def __init__(
        self, backend: Backend, window: Window, peak_tflops: float | None, say: Callable[[str], None]
    ) -> None:
        self.flops, self._uncounted, self.peak = 0.0, window.seconds, 0.0
        self._say, self._copy, self._each = say, None, 0.0  # FLOP of a token, once they are counted
        model = backend.unwrap()
        self._count = counter(model)
        if isinstance(self._count, str) and backend.is_main:
            try:
                self._copy = copied(model)
            except _FAILURES as error:
                say(f"the share of the device's peak (mfu) is left out: {self._count}, and {error}")
                return
            say(f"{self._count}: torch counts the first micro-batch for mfu, others go by their tokens")
        if backend.is_main:
            self.peak = peak_tflops * 1e12 if peak_tflops else measured_peak(backend.device, _dtype(backend, model))
            say(f"mfu is the share of {self.peak / 1e12:.3g} TFLOP/s{'' if peak_tflops else ', measured just now'}")
            model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, model: nn.Module, args: tuple, inputs: dict[str, Any]) -> None:
        if not model.training:
            return
        if isinstance(self._count, str):
            self.flops += self._counted(args, inputs)
        elif "labels" in inputs and "input_ids" in inputs:
            self.flops += self._count(inputs)

    def _counted(self, args: tuple, inputs: dict[str, Any]) -> float:
        """FLOP by those of the first micro-batch, in proportion to tokens."""
        tokens = [inputs[name] for name in ("input_ids", "labels") if isinstance(inputs.get(name), Tensor)]
        size = sum(value.numel() for value in tokens or args if isinstance(value, Tensor))
        made, self._copy = self._copy, None
        if made is not None:
            try:
                self._each = counted_flops(made.train(), args, inputs) / max(size, 1)
            except (*_FAILURES, StopIteration) as error:
                reason = " ".join(str(error).split())[:160]
                self._say(
                    f"mfu is left out: {self._count}, and torch cannot count it: {type(error).__name__}: {reason}"
                )
        return self._each * size

    def mfu(self, window: Window) -> dict[str, float]:
        """The share of the peak in the seconds of `window`, then counted afresh; nothing where it is not known."""
        seconds, flops = window.seconds - self._uncounted, self.flops
        self.flops = self._uncounted = 0.0
        return {"mfu": flops / seconds / self.peak} if self.peak and flops and seconds > 0 else {}


def _dtype(backend: Backend, model: nn.Module) -> torch.dtype:
    """The number format that products are computed in."""
    kind = backend.device.type
    with backend.autocast():
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return next(model.parameters()).dtype
