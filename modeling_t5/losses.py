"""Cross-entropy over a large vocabulary, from all logits at the same time or from those of a few tokens at a time.

A plain linear output layer computes the gradient in the forward pass. The logits of a few tokens are computed at a
time. Their gradient, softmax - target, overwrites them. The gradients of hidden states and weight follow immediately.
So no logits are saved for the backward pass, and none are computed twice (Wijmans et al. 2024, arXiv 2411.09009; Hsu
et al. 2024, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lm_experiments_tools.labels import IGNORED_LABEL as IGNORED
from lm_experiments_tools.modules.devices import has_kernels
from lm_experiments_tools.modules.fast_step import is_unwrapped
from lm_experiments_tools.modules.losses import exact

LOSS_CHUNK = 2048  # target tokens whose logits are held at once where nobody asks for logits; see `default_chunk`
LOGITS_SHARE = 64  # of a GPU's memory, 1 / 64 may be logits
BLOCK = 2**19  # logits in float32 that a CPU turns into gradients at a time: 2 MiB, which its caches hold


@torch.compiler.assume_constant_result
def default_chunk(device: torch.device, bytes_per_token: int) -> int:
    """Number of target tokens whose logits are held at once where nobody asks for logits: more on a large GPU.

    Each chunk reads and writes the weight's full gradient. The number depends on the GPU's memory, not on what of it
    is free, so that a resumed run adds the same sums.

    Args:
        bytes_per_token: size of the logits of one token.
    """
    if device.type != "cuda":
        return LOSS_CHUNK
    return max(LOSS_CHUNK, torch.cuda.get_device_properties(device).total_memory // LOGITS_SHARE // bytes_per_token)


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
    (`linear_token_loss`). Other heads (adapters, sharded or quantized weights), torch.compile and float16 recompute
    the logits in the backward pass.

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


def replaces_head(head: nn.Module, states: Tensor) -> bool:
    """True if `linear_token_loss` may compute output layer and loss in one step, without storing the logits.

    The layer has to be a plain `nn.Linear` without bias, hooks and wrappers. float16 is excluded: the gradient is
    computed in the forward pass, where the loss scale is not known yet.
    """
    is_linear = is_unwrapped(head, nn.Linear) and head.bias is None
    return is_linear and not torch.compiler.is_compiling() and compute_dtype(states) != torch.float16


def compute_dtype(states: Tensor) -> torch.dtype:
    """Dtype in which a matrix product with `states` is computed: autocast's, if enabled."""
    kind = states.device.type
    is_cast = torch.is_autocast_enabled(kind) and states.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else states.dtype


def linear_token_loss(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_size: int,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    compiled: bool = True,
) -> Tensor:
    """Compute the loss of a linear output layer with the logits of at most `chunk_size` tokens in memory.

    It equals `token_loss(states @ weight.T, labels)`.

    Args:
        states: hidden states, [tokens, features].
        weight: of the output layer, [vocabulary, features].
        labels: [tokens], -100 where there is none.
        chunk_size: tokens at a time; small numbers are slower, because the weight's full gradient is updated each
            time.
        z_loss, label_smoothing: as in `token_loss`.
        compiled: compile the loss where Triton runs.
    """
    if not torch.is_grad_enabled():
        states, weight = states.detach(), weight.detach()
    # not in a memory estimate, which has tensors without values
    is_compiled = compiled and has_kernels(states.device) and not is_in_torch_dispatch_mode()
    dtype = compute_dtype(states)
    return _LinearTokenLoss.apply(states, weight, labels, chunk_size, z_loss, label_smoothing, dtype, is_compiled)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_size: int,
        z_loss: float,
        label_smoothing: float,
        dtype: torch.dtype,
        is_compiled: bool,
    ) -> Tensor:
        wants_states, wants_weight = ctx.needs_input_grad[:2]
        with torch.autocast(states.device.type, enabled=False):
            x, w = states.to(dtype), weight.to(dtype)
            grad_states = torch.empty_like(x) if wants_states else None
            grad_weight, total = None, []
            for rows, targets, place in zip(
                x.split(chunk_size), labels.split(chunk_size), range(0, max(1, len(x)), chunk_size), strict=True
            ):
                logits = rows @ w.T
                if is_compiled:
                    loss, logits = _fused(logits, targets, z_loss, label_smoothing)
                else:
                    loss = turn_into_gradient(logits, targets, z_loss, label_smoothing)
                total.append(loss)
                if wants_states:
                    torch.mm(logits, w, out=grad_states[place : place + len(rows)])
                if wants_weight:
                    product = logits.T @ rows
                    grad_weight = product if grad_weight is None else grad_weight.to(weight.dtype).add_(product)
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.dtypes = states.dtype, weight.dtype
        return torch.stack(total).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        scaled = [
            None if product is None else product * grad.to(dtype).reshape(1, 1)  # cast and scaled in one pass
            for product, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, *[None] * 6


def _fused(logits: Tensor, labels: Tensor, *settings: float) -> tuple[Tensor, Tensor]:
    """`loss_and_gradient` in a few kernels of a GPU, the same for any number of tokens, as a resumed run needs."""
    for x in (logits, labels):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return _compiled()(logits, labels, *settings)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(loss_and_gradient)


def loss_and_gradient(logits: Tensor, labels: Tensor, z_loss: float, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute the loss of logits [tokens, vocabulary], and its gradient with respect to them, in their dtype.

    Args:
        labels: [tokens], -100 where there is none.
        z_loss, label_smoothing: as in `token_loss`.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_valid = (labels != IGNORED)[:, None]
    index = labels.where(labels != IGNORED, 0)[:, None]
    log_z = x.logsumexp(1, keepdim=True)
    loss = log_z - (1 - label_smoothing) * x.gather(1, index)
    if label_smoothing:
        loss = loss - label_smoothing * x.mean(1, keepdim=True)
    probabilities = (x - log_z).exp()
    if z_loss:
        loss = loss + z_loss * log_z.square()
        probabilities = probabilities * (1 + 2 * z_loss * log_z)
    is_target = (torch.arange(x.shape[1], device=x.device) == index).to(x.dtype)
    wanted = (1 - label_smoothing) * is_target + label_smoothing / x.shape[1]
    return (loss * is_valid).sum(), ((probabilities - wanted) * is_valid).to(logits.dtype)


def turn_into_gradient(logits: Tensor, labels: Tensor, z_loss: float, label_smoothing: float) -> Tensor:
    """Overwrite logits [tokens, vocabulary] with the gradient of the loss; returns the loss in float32 or higher.

    Args:
        labels: [tokens], -100 where there is none.
        z_loss, label_smoothing: as in `token_loss`.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    count, vocabulary = logits.shape
    block = max(1, BLOCK // vocabulary) if logits.device.type == "cpu" else max(1, count)
    losses = []
    for part, targets in zip(logits.split(block), labels.split(block), strict=True):
        is_valid = (targets != IGNORED)[:, None]
        index = targets.where(targets != IGNORED, 0)[:, None]
        x = part.to(exact, copy=True)
        highest = x.amax(1, keepdim=True)
        x.sub_(highest)
        loss = -(1 - label_smoothing) * x.gather(1, index)
        if label_smoothing:
            loss -= label_smoothing * x.mean(1, keepdim=True)
        total = x.exp_().sum(1, keepdim=True)
        log_total = total.log()
        log_z = log_total + highest
        loss += log_total
        factor = 1 / total
        if z_loss:
            loss += z_loss * log_z.square()
            factor *= 1 + 2 * z_loss * log_z
        x.mul_(factor)
        if label_smoothing:
            x.sub_(label_smoothing / vocabulary)
        x.scatter_add_(1, index, torch.full_like(loss, label_smoothing - 1))
        part.copy_(x.mul_(is_valid))
        losses.append((loss * is_valid).sum())
    return torch.stack(losses).sum()
