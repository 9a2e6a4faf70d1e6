"""Name what is not finite in a skipped step: parameters by their gradients, and the first module by its output."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lm_experiments_tools.backends.collective import say

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend

logger = logging.getLogger(__name__)
_MOST_NAMES = 5


def report_skipped(step: int, names: Sequence[str], backend: Backend, module: str | None, *, is_watched: bool) -> None:
    """Log what was not finite in a skipped step; collective if modules' outputs are checked (`is_watched`).

    `names` are this worker's parameters whose gradient is not finite, `module` describes its first such output.
    """
    if names:
        logger.warning("step %d: parameters whose gradient norm is not finite: %s", step, names_line(names))
    if not is_watched:
        return
    bad = [(rank, found) for rank, found in enumerate(backend.gather(module)) if found is not None]
    if bad and backend.is_main:
        logger.warning("step %d, rank %d: first not finite: %s", step, *bad[0])
    elif not bad:
        say(backend, f"step {step}: the output of every module is finite; the loss, a backward pass or a sum was not")


def names_line(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + others


class OutputWatch:
    """Context in which hooks on all modules note the first output that is not finite (`--debug_non_finite`).

    Each check waits for the device. Forward passes without gradients are not checked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._found = model, None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_hook(partial(self._check, name)))

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def take(self) -> str | None:
        """Description of the first module since the last call whose output was not finite; None if all were finite."""
        found, self._found = self._found, None
        return found

    # Compiled modules call the hook as plain Python, because it depends on values.
    @torch.compiler.disable
    def _check(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        if self._found is not None or not torch.is_grad_enabled():
            return
        for tensor in _values(output):
            if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
                self._found = _described(name, module, tensor.detach())
                return


def _values(output: Any) -> list[Tensor]:
    """Tensors of a module's output that are values: of a tuple the first, as masks of -inf may follow."""
    if isinstance(output, Mapping):
        return [value for value in output.values() if isinstance(value, Tensor)]
    tensors = list(output[:1]) if isinstance(output, (tuple, list)) else [output]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _described(name: str, module: nn.Module, values: Tensor) -> str:
    finite = values[values.isfinite()]
    largest = f"{finite.abs().max().item():.3g}" if finite.numel() else "none"
    return (
        f"{name or 'the model'} ({type(module).__name__}): its output, {str(values.dtype).removeprefix('torch.')} "
        f"{list(values.shape)}, {values.isnan().sum().item()} nan and {values.isinf().sum().item()} inf of "
        f"{values.numel()}, largest finite magnitude {largest}"
    )
