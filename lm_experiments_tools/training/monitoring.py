"""Norms (`--log_norms`) and largest magnitudes (`--log_maxima`) of each part of the model, every n steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_experiments_tools.backends.backend import total_norm
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.devices import read_later
from lm_experiments_tools.training.generators import preserved_random_state

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.callbacks import Callback
    from lm_experiments_tools.training.metrics import StepInfo
    from lm_experiments_tools.training.trainer import TrainingLoop

_HEADS = {"lm_head", "cls", "classifier", "head", "score", "qa_outputs"}
_WIDTHS = "n_heads", "num_heads", "num_attention_heads"
_PROJECTIONS = ("q", "k"), ("query", "key")


def monitoring_callbacks(args: TrainerArgs, trainer: TrainingLoop) -> list[Callback]:
    """Create the callbacks of `--log_norms` and `--log_maxima`; none with `--validate_only`.

    Resets `backend.before_update`, which `--log_norms` sets.

    Raises:
        UserError: `--log_norms` with DeepSpeed or apex, which hide the gradients of parameters.
    """
    trainer.backend.before_update = None  # of an earlier training
    if args.validate_only:
        return []
    requested = (args.log_norms, NormsCallback), (args.log_maxima, MaximaCallback)
    return [callback(every, trainer) for every, callback in requested if every is not None]


def part_of(name: str) -> str:
    """Map a parameter name to the part of the model under which its statistics are logged.

    A part is the first numbered module (`encoder.block.0` for `encoder.block.0.layer.0.SelfAttention.q.weight`),
    `embeddings`, `head`, or otherwise the module itself.
    """
    path = [piece for piece in name.split(".") if piece not in ("_orig_mod", "module")]
    for depth, piece in enumerate(path):
        if piece.isdecimal():
            return ".".join(path[: depth + 1])
    if any("embed" in piece for piece in path) or path[0] == "shared":
        return "embeddings"
    return "head" if _HEADS & set(path) else ".".join(path[:-1]) or "model"


class NormsCallback:
    """Callback that logs L2 norms of each part of the model (`--log_norms`).

    Logged are the norms of the reduced, unclipped gradient, of the weights, and of the update; also update / weights.

    Raises:
        UserError: the backend hides the gradients or weights of single parameters.
    """

    def __init__(self, every: int | None, trainer: TrainingLoop) -> None:
        backend = trainer.backend
        if backend.shards_optimizer:
            raise UserError(
                "--log_norms does not work with DeepSpeed, which keeps gradients in buffers of its own: use FSDP, DDP "
                "or Horovod, or leave it out"
            )
        if hasattr(backend.precision, "opt_level"):
            raise UserError("--log_norms does not work with --apex_opt_lvl, which trains copies of the weights")
        self.every, self._trainer = every, trainer
        self._parts: dict[str, list[nn.Parameter]] = {}
        for name, parameter in backend.unwrap().named_parameters():
            if parameter.requires_grad:
                self._parts.setdefault(part_of(name), []).append(parameter)
        self._before: dict[str, list[Tensor]] = {}
        self._gradients: list[Tensor] = []
        backend.before_update = self._before_update

    def _before_update(self) -> None:
        """Compute norms of the gradient and copy the weights, if the step will be logged."""
        self._before.clear()  # of a step that was skipped
        if (self._trainer.state.step + 1) % self.every:
            return
        gradients = {part: [p.grad for p in of if p.grad is not None] for part, of in self._parts.items()}
        self._gradients = [_norm(of_part, self._trainer.backend.device) for of_part in gradients.values()]
        self._before = {part: [p.detach().clone() for p in of] for part, of in self._parts.items()}

    @torch.no_grad()
    def on_step_end(self, trainer: TrainingLoop, info: StepInfo) -> None:
        device = trainer.backend.device
        weights = [_norm([p.detach() for p in of], device) for of in self._parts.values()]
        updates = []
        for part, before in self._before.items():
            torch._foreach_sub_(before, [p.detach() for p in self._parts[part]])
            updates.append(_norm(before, device))
        self._before = {}
        read = read_later(torch.stack([*self._gradients, *weights, *updates]))
        numbers, count = read(), len(self._parts)
        values = {}
        for index, part in enumerate(self._parts):
            gradient, weight, update = numbers[index::count]
            values |= {f"norm/gradient/{part}": gradient, f"norm/weight/{part}": weight}
            values |= {f"norm/update/{part}": update}
            values |= {f"norm/update_over_weight/{part}": update / weight} if weight else {}
        trainer.log("train", {}, **values)


def _norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """L2 norm over all of them, float32; collective for DTensors of FSDP2."""
    return total_norm(tensors).to(device, torch.float32)


class MaximaCallback:
    """Callback that logs the largest activations of each part of the model (`--log_maxima`).

    For each part it logs the largest magnitude of its modules' outputs, and a bound on its attention logits: scale *
    max |q| * max |k| over a head's queries q and keys k (Cauchy-Schwarz), before any position bias or mask.

    The values come from an extra forward pass without dropout over each worker's first micro-batch, with the weights
    after the step.
    """

    def __init__(self, every: int | None, trainer: TrainingLoop) -> None:
        self.every = every

    @torch.no_grad()
    def on_step_end(self, trainer: TrainingLoop, info: StepInfo) -> None:
        backend, maxima = trainer.backend, _Maxima(trainer.backend.unwrap())
        backend.model.eval()  # the trainer switches back
        with preserved_random_state(), torch.compiler.set_stance("force_eager"), maxima.hooked(), backend.autocast():
            backend.model(**trainer.micro_batches[0].inputs, **trainer.forward_kwargs)
        names = list(maxima.of)
        values = {}
        if names:
            read = read_later(torch.stack([maxima.of[name].to(backend.device, torch.float32) for name in names]))
            values = dict(zip(names, read(), strict=True))
        every = backend.gather(values)
        largest = {name: float(np.max([own[name] for own in every if name in own])) for name in values}  # NaN too
        trainer.log("train", {}, **largest)


class _Maxima:
    """Largest magnitudes of a forward pass by name, scalars on their devices."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.of = model, {}
        self._projected: dict[str, Tensor] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name:
                    hook = partial(self._output, part_of(f"{name}.weight"))
                    hooks.enter_context(module.register_forward_hook(hook))
                pair = next((p for p in _PROJECTIONS if all(hasattr(module, projection) for projection in p)), None)
                owners = (module, getattr(module, "config", None))
                heads = next((getattr(o, width) for o in owners for width in _WIDTHS if hasattr(o, width)), None)
                if pair is None or heads is None:
                    continue
                for projection in pair:
                    hook = partial(self._project, f"{name}.{projection}")
                    hooks.enter_context(getattr(module, projection).register_forward_hook(hook))
                hooks.enter_context(module.register_forward_hook(partial(self._attention, name, pair, heads)))
            yield

    def _output(self, part: str, module: nn.Module, args: tuple, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        values = first.values() if isinstance(first, Mapping) else [first]
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                self._note(f"maximum/activation/{part}", value.abs().max())

    def _project(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        self._projected[name] = output

    def _attention(self, name: str, pair: tuple[str, str], heads: int, module: nn.Module, args: tuple, _: Any) -> None:
        q, k = (self._projected.pop(f"{name}.{projection}", None) for projection in pair)
        if q is None or k is None:
            return
        largest = [x.float().unflatten(-1, (heads, -1)).norm(dim=-1).flatten(0, -2).amax(0) for x in (q, k)]
        plain = 1.0 if pair == ("q", "k") else (q.shape[-1] // heads) ** -0.5  # T5 does not scale
        bound = (largest[0] * largest[1]).max() * getattr(module, "scaling", plain)
        self._note(f"maximum/attention_logit_bound/{part_of(name + '.weight')}", bound)

    def _note(self, name: str, value: Tensor) -> None:
        self.of[name] = value if name not in self.of else torch.maximum(self.of[name], value.to(self.of[name]))
