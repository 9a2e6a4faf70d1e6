"""The optimizer Muon for the hidden matrices of a model, with AdamWScale or AdamW for all other parameters.

Unlike torch.optim.Muon, it takes all parameters, computes in the fastest number format of the device, skips steps on
the device, and gathers all FSDP2 matrices in one communication.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.modules.devices import has_bf16
from lm_experiments_tools.optimizers.adamw_scale import AdamWScale, Scalars
from lm_experiments_tools.optimizers.state import (
    float32_of,
    is_sharded,
    local,
    local_slice,
    restored_if_skipped,
    round_into,
    sums_over_slices,
    unless,
)

HIDDEN = "is_hidden"  # key of a parameter group: its matrices are orthogonalized
OTHERS = ("AdamWScale", "AdamW")
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the polynomial A x + B x^3 + C x^5, by Jordan et al. 2024
EPSILON = 1e-7  # smallest norm that a matrix is divided by
# Elements of small matrices that are orthogonalized at once. Their steps then take all cores, one matrix each, and
# still work in a core's cache.
_TOGETHER = 1 << 17


class Muon(AdamWScale):
    """Muon (Jordan et al. 2024) as in torch.optim.Muon, with another optimizer for all but hidden matrices.

    Hidden matrices are the weights of numbered layers. Their parameter groups have `is_hidden`, which
    `build_optimizer` sets. The update of a hidden matrix is its Nesterov momentum, made orthogonal by five
    Newton-Schulz steps, in bf16 where the hardware has it and in fp32 elsewhere. All other groups are updated by the
    optimizer `others`, with lr * `others_lr_scale`.

    Under FSDP2 the momentum is gathered in that format in one collective per step, so updates equal those of the
    unsharded model.

    Args:
        params: parameter groups; those without `is_hidden` are not hidden.
        lr: step size of hidden matrices, adjusted by `adjust_lr_fn`.
        momentum, nesterov, ns_steps, adjust_lr_fn: see torch.optim.Muon. "match_rms_adamw" gives updates of AdamW's
            size (0.2 * sqrt(longest side)); the default multiplies by sqrt(max(1, rows / columns)).
        others: optimizer of all other parameters, "AdamWScale" or "AdamW".
        others_lr_scale: factor of lr for the optimizer `others`.
        betas, eps: options of the optimizer `others`.
        weight_decay: decoupled weight decay, times lr.

    Raises:
        ValueError: a value out of range, a hidden parameter that is no matrix, or a torch (before 2.9) without Muon.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        others: str = "AdamWScale",
        others_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if others not in OTHERS:
            raise ValueError(f"others={others!r} must be one of {', '.join(OTHERS)}")
        if others_lr_scale < 0:
            raise ValueError(f"others_lr_scale={others_lr_scale} must not be negative")
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        for group in groups:
            if group.setdefault(HIDDEN, False):
                # checks the arguments, and that these are matrices
                options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
                torch.optim.Muon(list(group["params"]), lr, adjust_lr_fn=adjust_lr_fn, **options)
                group.update(options, adjust_lr_fn=adjust_lr_fn)
            else:
                group["lr"] = group.get("lr", lr) * others_lr_scale
                group["others"] = others
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, work: list[tuple[list[Tensor], dict]]) -> None:
        hidden = [(p, group) for parameters, group in work if group[HIDDEN] for p in parameters]
        self._update_hidden(hidden)
        rest = [(parameters, group) for parameters, group in work if not group[HIDDEN]]
        super().update([part for part in rest if part[1]["others"] == "AdamWScale"])
        known: Scalars = {}
        for parameters, group in rest:
            for parameter in parameters if group["others"] == "AdamW" else ():
                self._update(parameter, group, None, known)

    def _update_hidden(self, work: Sequence[tuple[Tensor, dict]]) -> None:
        directions = _full_matrices([self._direction(parameter, group) for parameter, group in work])
        for index, update in _orthogonalized(directions, [group["ns_steps"] for _, group in work]):
            parameter, group = work[index]
            if is_sharded(parameter):
                update = update[local_slice(parameter)]
            shard = local(parameter)
            weights, skip = float32_of(shard), self.skip_on(shard.device)
            weights.mul_(unless(skip, 1 - group["lr"] * group["weight_decay"], instead=1))
            rate = group["lr"] * _rate_factor(group["adjust_lr_fn"], parameter.shape)
            weights.add_(unless(skip, update), alpha=-rate)
            round_into(shard, weights)

    def _direction(self, parameter: Tensor, group: dict) -> Tensor:
        """Advance the momentum of a matrix and return the matrix to orthogonalize, sharded as the parameter."""
        state, grad = self.state[parameter], parameter.grad.float()
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        with restored_if_skipped(self.skip_on(buffer.device), [local(buffer)]):
            buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def orthogonalized(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Approximate the orthogonal factor U V^T of a matrix U S V^T, by Newton-Schulz steps of a quintic polynomial.

    Computes and returns bf16 where the hardware has it, otherwise fp32. Five steps bring singular values above 1 / 500
    of the Frobenius norm to between 0.68 and 1.21, not to 1; see https://kellerjordan.github.io/posts/muon/.

    Args:
        matrix: [rows, columns] or [matrices, rows, columns], any floating dtype.
    """
    rows, columns = matrix.shape[-2:]
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix.to(_fastest_dtype(matrix.device))
    x = x.mT if rows > columns else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPSILON)
    if x.dtype == torch.float32 and 2 * min(rows, columns) <= max(rows, columns):
        x = _polynomial_of_gram(x @ x.mT, num_steps) @ x
    else:
        for _ in range(num_steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if rows > columns else x


def _orthogonalized(matrices: Sequence[Tensor], num_steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the orthogonalized form of each matrix, small ones of one shape together."""
    alike = defaultdict(list)
    for index, matrix in enumerate(matrices):
        alike[matrix.shape, matrix.dtype, matrix.device, num_steps[index]].append(index)
    for (shape, *_, steps), indices in alike.items():
        number = max(1, _TOGETHER // shape.numel())
        for start in range(0, len(indices), number):
            chosen = indices[start : start + number]
            if len(chosen) == 1:
                yield chosen[0], orthogonalized(matrices[chosen[0]], steps)
            else:
                yield from zip(chosen, orthogonalized(torch.stack([matrices[i] for i in chosen]), steps), strict=True)


def _polynomial_of_gram(gram: Tensor, num_steps: int) -> Tensor:
    """Compute the matrix P of the steps' result P X from X X^T alone: fewer operations than steps on an oblong X.

    All matrices are polynomials in X X^T, so they commute. In bf16 this would lose the small singular values.
    """
    add_product = torch.addmm if gram.ndim == 2 else torch.baddbmm
    product = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    for step in range(num_steps):
        factor = add_product(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal(dim1=-2, dim2=-1).add_(_A)
        product = factor @ product
        if step < num_steps - 1:
            gram = factor @ gram @ factor
    return product


def hidden_matrices_first(groups: list[dict], named_parameters: Iterable[tuple[str, Tensor]]) -> list[dict]:
    """Split each parameter group in two for Muon: matrices of numbered layers, marked `is_hidden`, and all others.

    A numbered layer has a number in its parameters' names, as in `encoder.block.0. ...`. UserError if there is none.
    """
    hidden = {id(p) for name, p in named_parameters if p.ndim == 2 and _is_in_layer(name)}
    split = []
    for group in groups:
        split.append({**group, "params": [p for p in group["params"] if id(p) in hidden], HIDDEN: True})
        split.append({**group, "params": [p for p in group["params"] if id(p) not in hidden]})
    if not any(group.get(HIDDEN) and group["params"] for group in split):
        raise UserError("--optimizer Muon needs trainable matrices of numbered layers (encoder.block.0. ...).")
    return [group for group in split if group["params"]]


def _is_in_layer(name: str) -> bool:
    words = name.split(".")
    return any(map(str.isdigit, words)) and not any(word.endswith("bias") for word in words)


def _fastest_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if has_bf16(device.type) else torch.float32


def _rate_factor(adjust_lr_fn: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _full_matrices(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, DTensors unsharded in the dtype to compute in: one collective, which adds shards to zeros."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    parts = []
    for tensor in sharded:
        part = torch.zeros(tensor.shape, dtype=_fastest_dtype(tensor.device), device=tensor.device)
        part[local_slice(tensor)] = local(tensor).to(part.dtype)
        parts.append(part)
    gathered = iter(sums_over_slices(sharded, parts))
    return [next(gathered) if is_sharded(tensor) else tensor for tensor in tensors]
