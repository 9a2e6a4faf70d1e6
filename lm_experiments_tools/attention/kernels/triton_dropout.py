"""Dropout masks of the Triton attention kernels, computed from a seed and a score's position.

So the mask does not depend on the tile size. One random byte decides about one attention weight. A byte gives
probabilities that are multiples of 1 / 256 only, which `threshold_of` corrects on average. The four bytes of a random
32-bit word serve two rows by two columns, 8 apart: scores that one thread holds.
"""

import triton
import triton.language as tl


@triton.jit
def threshold_of(seed, sequence, drop_below, drop_chance):
    """Dropout threshold of one head in one sequence: attention weights whose random byte is below it are dropped.

    It is `drop_below` or, with probability drop_chance / 2^24, one more, so that its mean gives the exact dropout
    probability.
    """
    bits, _, _, _ = tl.philox(seed, sequence * 0, sequence * 0, sequence, sequence * 0 + 1, 7)
    return ((bits >> 8) < drop_chance).to(tl.uint32) + drop_below.to(tl.uint32)


@triton.jit
def random_bits_of(seed, sequence, first_query, first_key, M: tl.constexpr, N: tl.constexpr, BY_KEY: tl.constexpr):
    """Random 32-bit words for the dropout of a tile of M queries by N keys: [M / 2, N / 2], transposed if BY_KEY."""
    pairs = first_query // 2 + tl.arange(0, M // 2)
    calls = first_key // 32 * 4 + tl.arange(0, (N + 31) // 32 * 4)
    if BY_KEY:
        pairs, calls = pairs[None, :], calls[:, None]
    else:
        pairs, calls = pairs[:, None], calls[None, :]
    zeros = pairs * 0 + calls * 0
    a, b, c, d = tl.philox(seed, zeros + calls, zeros + pairs, zeros + sequence, zeros, 7)
    if N >= 32:
        bits = tl.join(tl.join(a, b), tl.join(c, d))  # the last two dimensions: keys 16 apart, 1 apart
        if BY_KEY:
            bits = tl.permute(tl.reshape(bits, [N // 32, 4, M // 2, 2, 2]), [0, 3, 1, 4, 2])
        else:
            bits = tl.permute(tl.reshape(bits, [M // 2, N // 32, 4, 2, 2]), [0, 1, 3, 2, 4])
    else:
        is_second = first_key // 16 % 2 == 1
        bits = tl.join(tl.where(is_second, b, a), tl.where(is_second, d, c))
        if BY_KEY:
            bits = tl.permute(bits, [0, 2, 1])
    return tl.reshape(bits, [N // 2, M // 2]) if BY_KEY else tl.reshape(bits, [M // 2, N // 2])


@triton.jit
def is_kept(
    seed, sequence, drop_below, drop_chance, query_tile, key_tile, M: tl.constexpr, N: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """Dropout mask of a tile of M queries by N keys, [M, N], transposed if BY_KEY: True for weights that are kept."""
    threshold = threshold_of(seed, sequence, drop_below, drop_chance)
    bits = random_bits_of(seed, sequence, query_tile * M, key_tile * N, M, N, BY_KEY)
    if BY_KEY:
        ROWS: tl.constexpr = N
        COLUMNS: tl.constexpr = M
    else:
        ROWS: tl.constexpr = M
        COLUMNS: tl.constexpr = N
    bits = tl.reshape(bits, [ROWS // 16, 1, 8, COLUMNS // 16, 1, 8])
    bits = tl.broadcast_to(bits, [ROWS // 16, 2, 8, COLUMNS // 16, 2, 8])
    bits = tl.reshape(bits, [ROWS, COLUMNS])
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if BY_KEY:
        shift = (columns & 8) * 2 + (rows & 8)
    else:
        shift = (rows & 8) * 2 + (columns & 8)
    return (bits << shift.to(tl.uint32)) >= (threshold << 24)


@triton.jit
def gradient_of(
    weights, dp, row_delta, grow, seed, sequence, drop_below, drop_chance, query_tile, key_tile, M: tl.constexpr,
    N: tl.constexpr, BY_KEY: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Backward pass of softmax and dropout: returns the attention weights after dropout and the scores' gradient.

    The returned weights are not rescaled by `grow`.

    Args:
        weights: attention weights before dropout.
        row_delta: for each query, the sum over features of the output times its gradient.
        grow: 1 / (1 - dropout probability).
    """
    dropped = weights
    if HAS_DROPOUT:
        keep = is_kept(seed, sequence, drop_below, drop_chance, query_tile, key_tile, M, N, BY_KEY)
        dropped = tl.where(keep, weights, 0.0)
        ds = weights * tl.where(keep, dp * grow - row_delta, -row_delta)
    else:
        ds = weights * (dp - row_delta)
    return dropped, ds
