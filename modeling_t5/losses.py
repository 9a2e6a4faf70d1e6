"""Cross-entropy over a large vocabulary, from all logits at the same time or from those of a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lm_experiments_tools.labels import IGNORED_LABEL as IGNORED
from lm_experiments_tools.modules.losses import exact
from modeling_t5.linear_loss import linear_token_loss, replaces_head


def token_loss(logits: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross-entropy over all tokens with a label, plus the z-loss if enabled; in float32 at least.

    A token adds -log p(label) + z_loss * log(Z)^2, where Z is the sum of exp(logits).

    Args:
        logits: [tokens, vocabulary].
        labels: [tokens], -100 where there is none.
        z_loss: weight of log(Z)^2, which keeps log(Z) near 0 (T5X; Chowdhery et al. 2022, arXiv 2204.02311, section
            5).
        label_smoothing: share of the target's probability spread over the vocabulary, the label included (Szegedy et
            al. 2016, arXiv 1512.00567, section 7).
    """
    logits = exact(logits)
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
    compiled: bool = True,
) -> Tensor:
    """Compute the loss of an output layer with the logits of at most `chunk_size` tokens in memory.

    It equals `token_loss(head(hidden_states), labels)`. A plain linear head computes its gradients in the forward pass
    (linear_loss.py). Other heads (adapters, sharded or quantized weights), torch.compile and float16 recompute the
    logits in the backward pass.

    Args:
        hidden_states: [tokens, features].
        head: the output layer, [tokens, features] -> [tokens, vocabulary].
        labels: [tokens], -100 where there is none.
        chunk_size: number of tokens whose logits are computed at a time.
        z_loss, label_smoothing: as in `token_loss`.
        compiled: compile the loss of a plain linear head where Triton runs.
    """
    if replaces_head(head, hidden_states):
        return linear_token_loss(hidden_states, head.weight, labels, chunk_size, z_loss, label_smoothing, compiled)

    def chunk_loss(states: Tensor, targets: Tensor) -> Tensor:
        return token_loss(head(states), targets, z_loss, label_smoothing)

    losses = [
        checkpoint(chunk_loss, states, targets, use_reentrant=False, preserve_rng_state=False)
        for states, targets in zip(hidden_states.split(chunk_size), labels.split(chunk_size), strict=True)
    ]
    return torch.stack(losses).sum()
