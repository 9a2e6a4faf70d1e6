"""Named parts of a model (embeddings, encoder, decoder, head, adapter), for freezing and for parameter counts."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import number_of
from lm_experiments_tools.modules.inspection import base_of
from lm_experiments_tools.names import nearest_names

PARTS = ("embeddings", "encoder", "decoder", "head", "adapter")
_ADAPTER_WORDS = ("lora_", "prompt_encoder", "trainable_tokens_delta")
_POSITIONS = ("wpe", "embed_positions", "position_embeddings")


def part_of_parameters(model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter to the part of the model that it belongs to.

    A tied (shared) parameter is listed once, under its first name. The parts are:

    - embeddings: token and position embeddings with their norms, also if shared with the output layer.
    - encoder, decoder: the layers.
    - head: everything after the layers, and a pooler.
    - adapter: the parameters that peft added.
    """
    base = base_of(model)
    embedding = {id(p) for p in base.get_input_embeddings().parameters()}
    layers = {id(p): part for part, module in _bodies(base).items() for p in module.parameters()}
    found = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if any(word.startswith(_ADAPTER_WORDS) for word in words):
            part = "adapter"
        elif id(parameter) in embedding or "embeddings" in words or any(word in _POSITIONS for word in words):
            part = "embeddings"
        else:
            part = "head" if "pooler" in words else layers.get(id(parameter), "head")
        found[name] = part
    return found


def _bodies(base: nn.Module) -> dict[str, nn.Module]:
    if base.config.is_encoder_decoder:
        return {"encoder": base.get_encoder(), "decoder": base.get_decoder()}
    body = getattr(base, base.base_model_prefix, base)
    return {"decoder" if base.can_generate() else "encoder": body}


def freeze(model: nn.Module, what: Sequence[str]) -> None:
    """Freeze chosen parameters of a model, so that training leaves them unchanged. Raises UserError.

    `--freeze encoder` does not freeze an embedding that the decoder shares; name `embeddings` too.

    Args:
        what: parts of the model (encoder, decoder, embeddings, head) or patterns of parameter names ("*.layer.0.*"). A
            tied (shared) parameter is frozen by any of its names.
    """
    for parameter in _chosen(model, what, "freeze"):
        parameter.requires_grad_(False)
    if what and not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze {' '.join(what)} leaves nothing to train: freeze less, or add --peft to a model.")


def train_only(model: nn.Module, what: Sequence[str]) -> None:
    """Freeze all parameters except parts or patterns as in `freeze`; none freezes nothing. Raises UserError."""
    chosen = {id(parameter) for parameter in _chosen(model, what, "trained")}
    for parameter in model.parameters() if what else ():
        parameter.requires_grad_(id(parameter) in chosen)


def _chosen(model: nn.Module, what: Sequence[str], flag: str) -> list[nn.Parameter]:
    """The parameters of parts and patterns of names; a tied one has several names."""
    parts = part_of_parameters(model) if what else {}
    parameters = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for pattern in what:
        if pattern in PARTS:
            chosen = [parameters[name] for name, part in parts.items() if part == pattern]
        else:
            chosen = [every[name] for name in fnmatch.filter(every, pattern)]
        if not chosen:
            near = nearest_names(pattern, {*parts.values(), *every}) or f"; parts are {', '.join(PARTS)}"
            raise UserError(f"--{flag} {pattern} matches nothing in {type(model).__name__}{near}.")
        found += chosen
    return found


@dataclass(frozen=True)
class PartSummary:
    """Number of parameters in a part of the model, number of trained ones, and bytes of all."""

    total: int = 0
    trainable: int = 0
    bytes: int = 0

    def __add__(self, other: PartSummary) -> PartSummary:
        return PartSummary(self.total + other.total, self.trainable + other.trainable, self.bytes + other.bytes)


@dataclass(frozen=True)
class ModelSummary:
    """Result of `summary`: a model's parameters by part; `str` gives a table."""

    parts: dict[str, PartSummary]

    @property
    def all(self) -> PartSummary:
        return sum(self.parts.values(), PartSummary())

    def __str__(self) -> str:
        rows = [("", "parameters", "trained", "MiB")]
        for name, part in [*self.parts.items(), ("all", self.all)]:
            rows.append((name, f"{part.total:,}", f"{part.trainable:,}", f"{part.bytes / 2**20:,.1f}"))
        return "\n".join(f"{row[0]:<10}  {row[1]:>13}  {row[2]:>13}  {row[3]:>9}".rstrip() for row in rows)


def summary(model: nn.Module) -> ModelSummary:
    """Count the parameters of a model by part (encoder, decoder, ...): all, trained, and bytes in memory.

    Bytes of quantized weights are counted as stored.
    """
    parts = {part: PartSummary() for part in PARTS}
    of = part_of_parameters(model)
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)  # 4-bit weights: two in a byte, and scales
        count = number_of(parameter) if state is None else state.shape.numel()
        scales = [t for t in (getattr(state, "absmax", None), getattr(parameter, "SCB", None)) if t is not None]
        size = sum(number_of(t) * t.element_size() for t in (parameter, *scales))
        parts[of[name]] += PartSummary(count, count if parameter.requires_grad else 0, size)
    return ModelSummary({part: found for part, found in parts.items() if found.total})
