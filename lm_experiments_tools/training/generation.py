"""Text that a model generates for a micro-batch, whatever kind of model it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.training.generators import seed_all
from lm_experiments_tools.training.micro_batches import MicroBatch

_LENGTHS = {"max_length", "max_new_tokens"}


def generate(
    model: nn.Module, part: MicroBatch, options: Mapping[str, Any], *, synced: bool = False, seed: int | None = None
) -> Tensor:
    """Tokens that `model.generate` writes after each row, int64[rows, length].

    An encoder-decoder reads `input_ids`. A decoder reads `prompt_ids` and `prompt_mask` of the batch, padded on the
    left, where there are any (`input_ids` would hold the answer too), and its prompt is cut off the result. Padding
    that all rows have is left out: how much there is depends on the other rows of this worker. Forks of t5-experiments
    name the prompt `input_ids_generate` and `attention_mask_generate`, and expect all that `model.generate` returns.

    Args:
        model: the user's model, without the wrappers of a backend.
        options: arguments of `generate`; without a length in them, as long as the labels and one token more.
        synced: forward passes are collective, so every worker generates until the last one is done.
        seed: sampled tokens are drawn by it and the rows, whatever was drawn before. None: as the process goes on.
    """
    device = next(iter(part.inputs.values())).device
    inputs, options = part.inputs, dict(options)
    prompt = part.batch.get("prompt_ids")
    if prompt is not None:
        mask = part.batch["prompt_mask"]
        first = int(mask.bool().any(dim=0).int().argmax())
        prompt, mask = prompt[:, first:], mask[:, first:]
        read = {"input_ids": prompt.to(device), "attention_mask": mask.to(device)}
    else:
        names = ("input_ids", "attention_mask", "global_attention_mask")
        read = {name: inputs[name] for name in names if name in inputs}
        if "input_ids_generate" in part.batch:
            read = {n: part.batch[f"{n}_generate"].to(device) for n in names if f"{n}_generate" in part.batch}
        if "labels" in inputs and not _LENGTHS & set(options):
            options["max_length"] = inputs["labels"].shape[-1] + 1  # one more for a special token
    if seed is not None:
        seed_all(seed, int(read["input_ids"].sum()))
    with torch.no_grad():
        written = model.generate(**read, synced_gpus=synced, **options)
    return written if prompt is None else written[:, prompt.shape[1] :]
