"""Text that a model generates for a micro-batch, whatever kind of model it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.batches import MicroBatch

_LENGTHS = {"max_length", "max_new_tokens"}


def generate(model: nn.Module, part: MicroBatch, options: Mapping[str, Any], *, synced: bool = False) -> Tensor:
    """What `model.generate` writes after each row, int64[rows, length].

    An encoder-decoder reads `input_ids`. A decoder reads `prompt_ids` and `prompt_mask` of the batch, padded on the
    left, where there are any (`input_ids` would hold the answer too), and its prompt is cut off the result.

    Args:
        model: the user's model, without the wrappers of a backend.
        options: arguments of `generate`; without a length in them, as long as the labels and one token more.
        synced: forward passes are collective, so every worker generates until the last one is done.
    """
    device = next(iter(part.inputs.values())).device
    inputs, options = part.inputs, dict(options)
    prompt = part.batch.get("prompt_ids")
    if prompt is not None:
        read = {"input_ids": prompt.to(device), "attention_mask": part.batch["prompt_mask"].to(device)}
    else:
        names = ("input_ids", "attention_mask", "global_attention_mask")
        read = {name: inputs[name] for name in names if name in inputs}
        if "labels" in inputs and not _LENGTHS & set(options):
            options["max_length"] = inputs["labels"].shape[-1] + 1  # one more for a special token
    with torch.no_grad():
        written = model.generate(**read, synced_gpus=synced, **options)
    return written if prompt is None else written[:, prompt.shape[1] :]


def after_prompts(
    model: nn.Module, prompts: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> dict[str, Tensor]:
    """`inputs_embeds` and `attention_mask` of every row of tokens behind each soft prompt.

    Args:
        model: whose input embeddings the tokens have.
        prompts: float[k, v, width].
        input_ids, attention_mask: int64[rows, length].

    Returns:
        [rows * k, v + length, ...]: row 0 behind prompts 0 to k - 1, row 1 behind ...
    """
    rows, (k, count, _) = input_ids.shape[0], prompts.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    words = model.get_input_embeddings()(input_ids).repeat_interleave(k, 0)
    return {
        "inputs_embeds": torch.cat([prompts.to(words.dtype).repeat(rows, 1, 1), words], 1),
        "attention_mask": torch.cat([mask.new_ones(rows * k, count), mask.repeat_interleave(k, 0)], 1),
    }


def generate_after_prompts(
    model: nn.Module, prompts: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """What `model.generate` writes for every row behind each soft prompt, int64[rows * k, length].

    As ever a decoder's text stands behind its `input_ids`, which penalties of repetition look at too. Positions follow
    from the mask, so padding on the left shifts none.
    """
    read = after_prompts(model, prompts, input_ids, attention_mask)
    if not model.config.is_encoder_decoder:
        read["input_ids"] = input_ids.repeat_interleave(prompts.shape[0], 0)
        if options.get("max_length") is not None:  # which transformers would count from the prompts on
            options.setdefault("max_new_tokens", options.pop("max_length") - input_ids.shape[1])
    return model.generate(**read, **options)
