"""Losses: cross-entropy over a large vocabulary (at once or in chunks), classification and regression."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from lm_experiments_tools.labels import IGNORED_LABEL as IGNORED
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.linear_loss import is_plain, linear_token_loss


def token_loss(logits: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Sum over valid labels of -log p(label) + z_loss * log(Z)^2, in float32 at least.

    Args:
        logits: [tokens, vocabulary].
        labels: [tokens], -100 where there is none.
        z_loss: weight of log(Z)^2, Z the sum of exp(logits), which keeps log(Z) near 0 (T5X; Chowdhery et al. 2022,
            arXiv 2204.02311, section 5).
        label_smoothing: share of the target's probability spread over the vocabulary, the label included (Szegedy et
            al. 2016, arXiv 1512.00567, section 7).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(-1).square() * (labels != IGNORED)).sum()
    return loss


def chunked_token_loss(
    hidden_states: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    chunk_size: int,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`token_loss(head(hidden_states), labels)` with the logits of at most `chunk_size` tokens in memory.

    For a head that is a linear layer, gradients are made in the forward pass (linear_loss.py). For others (adapters,
    sharded or quantized weights), under torch.compile and in float16 the backward pass computes each chunk's logits
    once more: one product with the vocabulary's matrix, about a third of the head's cost, instead of 4 to 10 bytes for
    each token and word.

    Args:
        hidden_states: [tokens, features].
        head: [tokens, features] -> [tokens, vocabulary].
        labels: [tokens], -100 where there is none.
    """

    if is_plain(head, hidden_states):
        return linear_token_loss(hidden_states, head.weight, labels, chunk_size, z_loss, label_smoothing)

    def chunk_loss(states: Tensor, targets: Tensor) -> Tensor:
        return token_loss(head(states), targets, z_loss, label_smoothing)

    losses = [
        checkpoint(chunk_loss, states, targets, use_reentrant=False, preserve_rng_state=False)
        for states, targets in zip(hidden_states.split(chunk_size), labels.split(chunk_size), strict=True)
    ]
    return torch.stack(losses).sum()


def classification_loss(config: T5Config, logits: Tensor, labels: Tensor) -> Tensor:
    """By `config.problem_type`, which is set from the first labels seen, as transformers does; in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.problem_type is None:
        if config.num_labels == 1:
            config.problem_type = "regression"
        else:
            is_class = labels.dtype in (torch.long, torch.int)
            config.problem_type = "single_label_classification" if is_class else "multi_label_classification"
    if config.problem_type == "regression":
        return mse_loss(logits.squeeze(), labels.squeeze().to(logits.dtype))
    if config.problem_type == "single_label_classification":
        labels = labels.flatten()
        return token_loss(logits.view(-1, config.num_labels), labels) / (labels != IGNORED).sum().clamp(min=1)
    return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
