"""Dropout's mask in the Triton kernels: a function of the seed and of where a score stands, not of the tiles.

A byte of randomness decides on a weight, so that one call of Philox serves 16. Bytes keep probabilities only to
multiples of 1 / 256; `threshold_of` makes up for that. A 32-bit word is for scores that a thread has in its hands in
whichever order a kernel has queries and keys: two rows by two columns, 8 apart.
"""

import triton
import triton.language as tl


@triton.jit
def threshold_of(seed, sequence, drop_below, drop_chance):
    """The byte below which the weights of this head of this sequence are dropped.

    It is `drop_below`, or one more with a chance of drop_chance / 2^24: over heads and calls, exactly the probability.
    """
    words, _, _, _ = tl.philox(seed, sequence * 0, sequence * 0, sequence, sequence * 0 + 1, 7)
    return ((words >> 8) < drop_chance).to(tl.uint32) + drop_below.to(tl.uint32)


@triton.jit
def words_of(seed, sequence, first_query, first_key, M: tl.constexpr, N: tl.constexpr, BY_KEY: tl.constexpr):
    """Random words for 2 x 2 scores each, 8 queries and 8 keys apart: [M / 2, N / 2], or [N / 2, M / 2] by key.

    Four words come from one call of Philox: those of keys 1 and 16 apart, which a thread has in its hands.
    """
    pairs = first_query // 2 + tl.arange(0, M // 2)
    calls = first_key // 32 * 4 + tl.arange(0, 4 * tl.cdiv(N, 32))
    if BY_KEY:
        pairs, calls = pairs[None, :], calls[:, None]
    else:
        pairs, calls = pairs[:, None], calls[None, :]
    zeros = pairs * 0 + calls * 0
    a, b, c, d = tl.philox(seed, zeros + calls, zeros + pairs, zeros + sequence, zeros, 7)
    if N >= 32:
        words = tl.join(tl.join(a, b), tl.join(c, d))  # the last two dimensions: keys 16 apart, 1 apart
        if BY_KEY:
            words = tl.permute(tl.reshape(words, [N // 32, 4, M // 2, 2, 2]), [0, 3, 1, 4, 2])
        else:
            words = tl.permute(tl.reshape(words, [M // 2, N // 32, 4, 2, 2]), [0, 1, 3, 2, 4])
    else:
        is_second = first_key // 16 % 2 == 1
        words = tl.join(tl.where(is_second, b, a), tl.where(is_second, d, c))
        if BY_KEY:
            words = tl.permute(words, [0, 2, 1])
    return tl.reshape(words, [N // 2, M // 2]) if BY_KEY else tl.reshape(words, [M // 2, N // 2])


@triton.jit
def is_kept(
    seed, sequence, drop_below, drop_chance, query_tile, key_tile, M: tl.constexpr, N: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """True for weights that dropout leaves: a function of the seed and of where they stand, not of the tiles."""
    threshold = threshold_of(seed, sequence, drop_below, drop_chance)
    words = words_of(seed, sequence, query_tile * M, key_tile * N, M, N, BY_KEY)
    if BY_KEY:
        ROWS: tl.constexpr = N
        COLUMNS: tl.constexpr = M
    else:
        ROWS: tl.constexpr = M
        COLUMNS: tl.constexpr = N
    words = tl.reshape(words, [ROWS // 16, 1, 8, COLUMNS // 16, 1, 8])
    words = tl.broadcast_to(words, [ROWS // 16, 2, 8, COLUMNS // 16, 2, 8])
    words = tl.reshape(words, [ROWS, COLUMNS])
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if BY_KEY:
        shift = (columns & 8) * 2 + (rows & 8)
    else:
        shift = (rows & 8) * 2 + (columns & 8)
    return (words << shift.to(tl.uint32)) >= (threshold << 24)


@triton.jit
def gradient_of(
    weights, dp, row_delta, grow, seed, sequence, drop_below, drop_chance, query_tile, key_tile, M: tl.constexpr,
    N: tl.constexpr, BY_KEY: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """(weights that dropout leaves, gradient of the scores): `grow` is what those that it leaves are multiplied by."""
    dropped = weights
    if HAS_DROPOUT:
        keep = is_kept(seed, sequence, drop_below, drop_chance, query_tile, key_tile, M, N, BY_KEY)
        dropped = tl.where(keep, weights, 0.0)
        ds = weights * tl.where(keep, dp * grow - row_delta, -row_delta)
    else:
        ds = weights * (dp - row_delta)
    return dropped, ds
