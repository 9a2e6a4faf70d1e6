"""Position biases of attention that depend only on the distance key - query: T5's relative attention bias and ALiBi.

For N tokens such a bias is an N x N matrix with constant diagonals (a Toeplitz matrix). So it is stored as one vector
per head (`table`) and expanded to a matrix (`dense`) only where needed. Gradients are summed in a fixed order, so
equal inputs give bitwise equal results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError


def t5_bucket(relative_position: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Map each relative position to its bucket in T5's relative attention bias (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each. The others hold logarithmically growing ranges of distances up to
    `max_distance`. Results equal those of transformers exactly.

    Args:
        relative_position: key position - query position, any shape, int64.
        bidirectional: use half of the buckets for keys after the query; otherwise all of these are in bucket 0.

    Returns:
        Bucket numbers in [0, num_buckets), int64, in the same shape.
    """
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (relative_position > 0) * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    num_exact = num_buckets // 2
    logarithm = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (logarithm * (num_buckets - num_exact)).long()
    return buckets + torch.where(distance < num_exact, distance, far.clamp(max=num_buckets - 1))


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # cached for training too
def _table_buckets(bidirectional: bool, num_buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """Buckets of distances -s..s, int64[2 * s + 1], where s is the smallest beyond which nothing changes."""
    reach = torch.arange(-max_distance - 1, max_distance + 2, device="cpu")
    buckets = t5_bucket(reach, bidirectional, num_buckets, max_distance)
    # Distances whose next one has another bucket.
    changes = (buckets[1:] != buckets[:-1]).nonzero().flatten() - max_distance - 1
    saturation = int(max(-changes[0], changes[-1] + 1))
    covered = torch.arange(-saturation, saturation + 1, device="cpu")
    return t5_bucket(covered, bidirectional, num_buckets, max_distance).to(device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _buckets_between(
    low: int, high: int, bidirectional: bool, num_buckets: int, max_distance: int, device: torch.device
) -> Tensor:
    """Buckets of distances low..high, int64[high - low + 1]."""
    return t5_bucket(torch.arange(low, high + 1, device="cpu"), bidirectional, num_buckets, max_distance).to(device)


@dataclass(eq=False)
class T5Bias:
    """The relative attention bias of T5: one learned number per head and bucket of distances, added to scores.

    Args:
        weight: [num_buckets, heads], as in transformers' `relative_attention_bias.weight`.
        bidirectional: True in an encoder, False in a decoder.
        num_buckets: rows of `weight`.
        max_distance: this distance and all larger ones share the last bucket. Raises UserError.
    """

    weight: Tensor
    bidirectional: bool = True
    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or self.weight.shape[0] != self.num_buckets:
            raise UserError(f"T5Bias: weight is {list(self.weight.shape)}, not [{self.num_buckets} buckets, heads].")
        num_exact = self.num_buckets // (4 if self.bidirectional else 2)
        if num_exact < 1 or self.max_distance <= num_exact:
            raise UserError(
                f"T5Bias: num_buckets={self.num_buckets} must be at least {4 if self.bidirectional else 2}, and "
                f"max_distance={self.max_distance} above {num_exact}."
            )

    @property
    def num_heads(self) -> int:
        return self.weight.shape[1]

    def table(self, length: int | None = None) -> Tensor:
        """Bias of each distance key - query from -s to s, beyond which it no longer changes (91 in T5's encoder)."""
        buckets = _table_buckets(self.bidirectional, self.num_buckets, self.max_distance, self.weight.device)
        return self.weight[buckets].t()

    def between(self, low: int, high: int) -> Tensor:
        """Look up the bias of each distance key - query from low to high: [heads, high - low + 1]."""
        find = _buckets_between if _are_numbers(low, high) else _buckets_between.__wrapped__
        buckets = find(low, high, self.bidirectional, self.num_buckets, self.max_distance, self.weight.device)
        # contiguous: adding a mask to the matrix made of it takes a quarter of the time
        return self.weight[buckets].t().contiguous()


@dataclass(eq=False)
class AlibiBias:
    """Attention with linear biases (Press et al. 2022), added to scores: -slope * |key position - query position|.

    Args:
        slopes: one factor per head, [heads], as from `alibi_slopes`; they may be learned.
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        if self.slopes.dim() != 1:
            raise UserError(f"AlibiBias: slopes has shape {list(self.slopes.shape)}, not [heads].")

    @property
    def num_heads(self) -> int:
        return self.slopes.shape[0]

    def table(self, length: int) -> Tensor:
        """Bias of each distance key - query of up to `length` tokens: [heads, 2 * length - 1]."""
        distance = torch.arange(1 - length, length, device=self.slopes.device).abs()
        return -self.slopes[:, None] * distance.to(self.slopes.dtype)


@dataclass(eq=False)
class T5Table:
    """A T5 position bias computed once and shared by several layers: the contiguous result of `T5Bias.table`."""

    values: Tensor

    @property
    def num_heads(self) -> int:
        return self.values.shape[0]

    def table(self, length: int | None = None) -> Tensor:
        return self.values


DistanceBias = T5Bias | AlibiBias | T5Table
Bias = DistanceBias | Tensor
_VALUES = {T5Bias: "weight", AlibiBias: "slopes", T5Table: "values"}


def values_of(bias: Bias | None) -> Tensor | None:
    """Tensor that stores a position bias: weights of T5, slopes of ALiBi, or a bias matrix itself; None stays None."""
    return getattr(bias, _VALUES[type(bias)]) if isinstance(bias, DistanceBias) else bias


def with_values(bias: Bias | None, values: Tensor | None) -> Bias | None:
    """Copy a position bias, but with another tensor for its values (see `values_of`)."""
    return replace(bias, **{_VALUES[type(bias)]: values}) if isinstance(bias, DistanceBias) else values


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """Slopes of the ALiBi paper, one for each head: [num_heads].

    For n heads, n a power of two, they are 2^(-8/n), 2^(-16/n), ... For another number of heads, they are the slopes
    of the next lower power of two, filled up with every second slope of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes, device=device)


class _Toeplitz(torch.autograd.Function):
    """[..., rows + columns - 1] -> [..., rows, columns], where element (r, c) is vector[c - r + rows - 1]."""

    @staticmethod
    def forward(vector: Tensor, rows: int, columns: int) -> Tensor:
        return vector.unfold(-1, columns, 1).flip(-2)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        """Nothing is saved. torch.func requires this method."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_diagonals(grad), None, None


def toeplitz(vector: Tensor, rows: int, columns: int) -> Tensor:
    """Expand vectors [..., rows + columns - 1] to matrices whose element (r, c) is vector[c - r + rows - 1].

    It turns position biases by distance into matrices of queries and keys.
    """
    if _are_numbers(rows, columns):
        return _Toeplitz.apply(vector, rows, columns)
    # unfolding would fix the lengths
    return diagonals(vector.unsqueeze(-2).expand(*vector.shape[:-1], rows, rows + columns - 1), columns)


def diagonals(x: Tensor, columns: int) -> Tensor:
    """Relative shift of x [..., rows, rows + columns - 1]: element (r, c) of the result is x[r, c - r + rows - 1].

    It turns scores by distance into scores by key position (Huang et al. 2018, arXiv 1809.04281, section 3.4.1).
    """
    # Rows padded by one element are read as rows of one element less: each starts one element earlier.
    rows, width = x.shape[-2:]
    flat = torch.nn.functional.pad(x, (0, 1)).flatten(-2)
    return flat[..., rows - 1 : rows - 1 + rows * width].unflatten(-1, (rows, width))[..., :columns]


def _are_numbers(*lengths: int) -> bool:
    """True if lengths are known, which they are not in a trace."""
    return not torch.compiler.is_compiling() and all(isinstance(length, int) for length in lengths)


def sum_diagonals(matrices: Tensor) -> Tensor:
    """Sum each diagonal of matrices [..., rows, columns], from the bottom left: the backward pass of `toeplitz`."""
    rows, columns = matrices.shape[-2:]
    width = rows + columns - 1
    padded = torch.nn.functional.pad(matrices.flip(-2), (0, rows))  # rows of width + 1, read as rows of width below
    skewed = padded.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width))
    return skewed.sum(-2)


def extend(table: Tensor, low: int, high: int) -> Tensor:
    """Extend or cut a table for distances -s..s to low..high, where low <= 0 <= high: [heads, high - low + 1]."""
    saturation = table.shape[-1] // 2
    inner = table[:, max(0, low + saturation) : high + saturation + 1]
    left, right = max(0, -saturation - low), max(0, high - saturation)
    return torch.cat([table[:, :1].expand(-1, left), inner, table[:, -1:].expand(-1, right)], dim=1)


def dense_bias(bias: DistanceBias, query_length: int, key_length: int, dtype: torch.dtype | None = None) -> Tensor:
    """Expand a position bias by distance to a matrix [1, heads, query_length, key_length], in the dtype given."""
    low, high = 1 - query_length, key_length - 1
    if isinstance(bias, T5Bias):
        vector = bias.between(low, high)
    else:
        vector = extend(bias.table(max(query_length, key_length)), low, high)
    return toeplitz(vector.to(dtype or vector.dtype), query_length, key_length).unsqueeze(0)


def wants_gradient(bias: Bias | None) -> bool:
    """True if a position bias requires a gradient in this call; False for None."""
    if bias is None or not torch.is_grad_enabled():
        return False
    return values_of(bias).requires_grad


def distance_tiles(table: Tensor, block: int) -> Tensor:
    """Cut the matrix of a position bias by distance into tiles of block x block scores, and keep one of each kind.

    A tile depends only on m = key block - query block. With table distances -s..s, it is constant for |m| >= M, where
    M = ceil((s + block - 1) / block), so 2 * M + 1 tiles are enough.

    Args:
        table: bias of each distance -s..s, [heads, 2 * s + 1].

    Returns:
        [heads, 2 * M + 1, block, block] for m = -M..M.
    """
    reach = -(-(table.shape[-1] // 2 + block - 1) // block)
    vector = extend(table, -reach * block - block + 1, reach * block + block - 1)
    return toeplitz(vector.unfold(-1, 2 * block - 1, block), block, block)  # from the tile's 2 * block - 1 values


# Tokens up to which the backend "auto" takes SDPA on a CPU: a short call costs less than splitting it into chunks.
# SDPA has no fused loop for a trained bias, so a longer dense call with one is split too.
SHORT, SHORT_DENSE = 256, 1024


def shared_bias(
    bias: Bias | None,
    query_length: int,
    key_length: int,
    backend: str,
    device: torch.device | None = None,
    is_dense: bool = False,
) -> Bias | None:
    """Expand a position bias to a matrix once for all layers, if each layer would otherwise expand it again.

    The bias is returned unchanged for backends that read it by distance. The result does not depend on whether
    gradients are enabled, because reentrant checkpoints run each layer with and without them.

    Args:
        device: the model's device, for the backend "auto"; None returns the bias unchanged.
        is_dense: True if no layer has a block-sparse layout.
    """
    if bias is None or isinstance(bias, Tensor):
        return bias
    if backend == "auto":
        # In a graph the answer must not depend on the length: it would be compiled once for short and once for long.
        if device is None or device.type != "cpu" or torch.compiler.is_compiling():
            return bias
        if max(query_length, key_length) > (SHORT_DENSE if is_dense else SHORT):
            return bias
    return dense_bias(bias, query_length, key_length)
