"""Triton kernels: block-sparse flash attention with a trainable position bias, forward and backward, without atomics.

A tile is a block of queries or keys. A program computes one row tile (of queries or keys) and loops over a sorted list
of column tiles. So every sum is formed by one program in a fixed order, and equal inputs give equal bits.

A T5 bias is constant beyond some distance, its saturation. Each list therefore has three runs: tiles far left of the
diagonal, tiles near it, tiles far right. A far tile adds one number. A near tile looks its biases up in a table, and
may meet the diagonal of a causal mask. Each kernel has one loop over both far runs and one over the near run.

Scores are in base 2: `scale2`, tables and values are multiplied by log2(e). `lse` is the base-2 log-sum-exp of a row,
+inf for rows without allowed keys, so that exp2(score - lse) is zero there.

Shapes: q [batch, heads, query_length, HEAD_DIM], k likewise, v [..., VALUE_DIM]; q, k, v have strides of their own in
the first three dimensions, the output and its gradient those of `o`. dq, dk and dv are [batch, length, heads, dim] in
memory, each with a stride of its own between tokens. M is a tile of queries, N one of keys.
"""

import triton
import triton.language as tl

from lm_experiments_tools.attention.kernels.triton_dropout import gradient_of, is_kept

T5 = tl.constexpr(1)
ALIBI = tl.constexpr(2)  # 0 is no bias
FIRST_SEGMENT, LAST_SEGMENT = tl.constexpr(-(1 << 63)), tl.constexpr((1 << 63) - 1)  # of int64

# Arguments whose values do not make another kernel.
VARYING = [
    "drop_below",
    "drop_chance",
    "num_heads",
    "layout_heads",
    "query_length",
    "key_length",
    "num_tiles",
    "sequences",
]


@triton.jit
def load_rows(
    base, tile, ROWS: tl.constexpr, stride, length, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EVEN: tl.constexpr
):
    """Load a tile of rows from a [length, DIM] matrix: [ROWS, BLOCK_DIM], with zeros outside of the matrix."""
    first = tile * ROWS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    pointers = base + first * stride + (rows[:, None] * stride + dims[None, :])  # the sum in brackets leaves a loop
    if EVEN and DIM == BLOCK_DIM:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(first + rows[:, None] < length) & (dims[None, :] < DIM), other=0.0)
    return values


@triton.jit
def store_rows(base, values, rows, stride, length, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store rows into a [length, DIM] matrix, in its dtype."""
    dims = tl.arange(0, BLOCK_DIM)
    pointers = base + rows[:, None] * stride + dims[None, :]
    mask = (rows[:, None] < length) & (dims[None, :] < DIM)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_by_token(base, values, rows, batch, head, stride, length, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store rows of one head into [batch, length, heads, DIM], where tokens are `stride` apart."""
    store_rows(base + batch * length * stride + head * DIM, values, rows, stride, length, DIM, BLOCK_DIM)


@triton.jit
def bias_of(table, columns_less_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the T5 bias of a tile of scores near the diagonal, [ROWS, COLUMNS].

    `table` holds the values by column - row four times, each copy shifted by one. Row r reads copy r % 4, which aligns
    the loads.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    starts = columns_less_rows + WIDTH // 2 + rows % 4 * WIDTH - rows // 4 * 4
    return tl.load(table + starts[:, None] + columns[None, :], cache_modifier=".ca")


@triton.jit
def score(
    product, scale2, base, value, queries, keys, bits, query_segments, key_segments, query_length, key_length,
    BIAS: tl.constexpr, NEAR: tl.constexpr, CAUSAL: tl.constexpr, HAS_BITS: tl.constexpr, SUB_M: tl.constexpr,
    SUB_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Compute the masked attention scores of a tile, times log2(e) because softmax is computed with exp2.

    Args:
        product: q k^T of the tile, or its transpose.
        base: added to the scaled product, e.g. a bias.
        value: ALiBi's slope.
        queries, keys: positions, one as a column and one as a row.
        bits: one bit for each layout block in the tile, 0 for a masked block.
    """
    scores = product * scale2 + base
    if BIAS == ALIBI:
        scores -= value * tl.abs(keys.to(tl.float32) - queries.to(tl.float32))
    if HAS_SEGMENTS:
        mine = tl.load(query_segments + queries, mask=queries < query_length, other=0)
        scores = tl.where(mine == tl.load(key_segments + keys, mask=keys < key_length, other=0), scores, float("-inf"))
    if HAS_BITS:  # several blocks of the layout in one tile: a bit for each
        place = (queries % BLOCK_M) // SUB_M * (BLOCK_N // SUB_N) + (keys % BLOCK_N) // SUB_N
        scores = tl.where(((bits >> place) & 1) != 0, scores, float("-inf"))
    if CAUSAL and NEAR:
        scores = tl.where(keys <= queries, scores, float("-inf"))
    return scores


@triton.jit
def scores_by_query(
    q_tile, k_tile, base, scale2, table, value, key_mask, tile, key_tile, bits, query_segments, key_segments,
    query_length, key_length, WIDTH: tl.constexpr, BIAS: tl.constexpr, NEAR: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BITS: tl.constexpr, SUB_M: tl.constexpr, SUB_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention scores of a tile [BLOCK_M queries, BLOCK_N keys] with bias and masks.

    `base` [BLOCK_M, 1] is added if HAS_BASE.
    """
    queries, keys = tile * BLOCK_M + tl.arange(0, BLOCK_M), key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if BIAS == T5:
        away = key_tile * BLOCK_N - tile * BLOCK_M
        added = bias_of(table, away, WIDTH, BLOCK_M, BLOCK_N) if NEAR else value
        base = base + added if HAS_BASE else added  # adding a constant 0 would cost an instruction
    if HAS_PADDING:
        base += tl.load(key_mask + keys)[None, :]
    return score(
        product, scale2, base, value, queries[:, None], keys[None, :], bits, query_segments, key_segments,
        query_length, key_length, BIAS, NEAR, CAUSAL, HAS_BITS, SUB_M, SUB_N, BLOCK_M, BLOCK_N, HAS_SEGMENTS,
    )  # fmt: skip


@triton.jit
def tile_at(step, first_steps, first, second, tiles, tile_bits, DENSE: tl.constexpr, HAS_BITS: tl.constexpr):
    """Look up the tile that a kernel computes at a step of its loop (see `steps_of`), and the tile's mask bits."""
    index = step + tl.where(step < first_steps, first, second)
    tile = index if DENSE else tl.load(tiles + index)
    bits = tl.load(tile_bits + index) if HAS_BITS else 0
    return tile, bits


@triton.jit
def ordered(segments):
    """Segment IDs with padding (0) after all documents, as it is in rows: a tile's IDs then are a range of few."""
    return tl.where(segments == 0, LAST_SEGMENT, segments)


@triton.jit
def within(first, end, x):
    """x, at least `first` and at most `end`."""
    return tl.minimum(tl.maximum(x, first), end)


@triton.jit
def tiles_met(
    own_segments, other_segments, key_mask, tile, own_length, other_length, ROWS: tl.constexpr,
    OTHER_ROWS: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SEGMENTS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Range of the tiles of keys (BY_KEY: of queries) that a tile may attend to: its first, and past its last.

    It reaches from the first token that is not padding and whose document may be in the tile to the last one. All
    scores of other tiles are masked, so that skipping them changes no bit.
    """
    own = tile * ROWS + tl.arange(0, ROWS)
    is_own = own < own_length
    if HAS_PADDING and BY_KEY:
        is_own &= tl.load(key_mask + own) == 0.0
    if HAS_SEGMENTS:
        mine = ordered(tl.load(own_segments + own, mask=is_own, other=0))
        low, high = tl.min(mine, 0), tl.max(tl.where(is_own, mine, FIRST_SEGMENT), 0)
    first, last = other_length, -1
    for start in tl.range(0, other_length, 512):
        others = start + tl.arange(0, 512)
        meets = (others < other_length) & (tl.max(is_own.to(tl.int32), 0) > 0)
        if HAS_PADDING and not BY_KEY:
            meets &= tl.load(key_mask + others, mask=meets, other=float("-inf")) == 0.0
        if HAS_SEGMENTS:
            theirs = ordered(tl.load(other_segments + others, mask=meets, other=0))
            meets &= (theirs >= low) & (theirs <= high)
        first = tl.minimum(first, tl.min(tl.where(meets, others, other_length), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, others, -1), 0))
    past = (last + OTHER_ROWS) // OTHER_ROWS  # 0 if there is none
    return tl.minimum(first // OTHER_ROWS, past), past


@triton.jit
def list_of(
    ranges, order, num_tiles, num_heads, layout_heads, sequences, key_mask, query_segments, key_segments, stride_mask,
    query_length, key_length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK_MAJOR: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_SEGMENTS: tl.constexpr, SKIPS: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Find out which part of attention this program computes: its row of tiles, and the list of tiles in that row.

    Returns batch * heads + head, batch, head, the number of the row, the bounds of the three runs of the list, and the
    addresses of the masks of this sequence.
    """
    program = tl.program_id(0)
    if RANK_MAJOR:  # longest lists of all sequences first
        rank, sequence = program // sequences, program % sequences
    else:
        rank, sequence = program % num_tiles, program // num_tiles
    batch, head = (sequence // num_heads).to(tl.int64), sequence % num_heads
    of_layout = (head % layout_heads) * num_tiles
    tile = tl.load(order + of_layout + rank)
    runs = ranges + (of_layout + tile) * 4
    begin, near, after, end = tl.load(runs), tl.load(runs + 1), tl.load(runs + 2), tl.load(runs + 3)
    key_mask += batch * stride_mask
    query_segments, key_segments = query_segments + batch * query_length, key_segments + batch * key_length
    if SKIPS:
        if BY_KEY:
            first, past = tiles_met(
                key_segments, query_segments, key_mask, tile, key_length, query_length, BLOCK_N, BLOCK_M, HAS_PADDING,
                HAS_SEGMENTS, True,
            )  # fmt: skip
        else:
            first, past = tiles_met(
                query_segments, key_segments, key_mask, tile, query_length, key_length, BLOCK_M, BLOCK_N, HAS_PADDING,
                HAS_SEGMENTS, False,
            )  # fmt: skip
        begin, near = within(first, past, begin), within(first, past, near)
        after, end = within(first, past, after), within(first, past, end)
    return (
        sequence, batch, head.to(tl.int64), tile, begin, near, after, end, key_mask, query_segments, key_segments,
    )  # fmt: skip


@triton.jit
def steps_of(begin, near, after, end, NEAR: tl.constexpr):
    """Bounds of a loop over a program's tiles near the diagonal or, without NEAR, those far to its left and right.

    The tiles are one or two runs of a list. Returns (number of steps, steps in the first run, list index of step 0,
    offset of list indices in the second run).
    """
    if NEAR:
        steps, first_steps, first, second = after - near, after - near, near, near
    else:
        first_steps = near - begin
        steps, first, second = first_steps + end - after, begin, after - first_steps
    return steps, first_steps, first, second


@triton.jit
def values_of(table, head, WIDTH: tl.constexpr, BIAS: tl.constexpr, BY_KEY: tl.constexpr):
    """Address of this head's bias table, and the bias of tiles far left and far right of the diagonal.

    For ALiBi, both numbers are the head's slope.
    """
    left, right = 0.0, 0.0
    if BIAS == T5:
        table += head * (8 * WIDTH)
        left, right = tl.load(table), tl.load(table + WIDTH - 1)
        if BY_KEY:
            table += 4 * WIDTH
    if BIAS == ALIBI:
        left = tl.load(table + head)
        right = left
    return table, left, right


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, o, lse, table, key_mask, query_segments, key_segments, ranges, order, tiles, tile_bits, seed, drop_below,
    drop_chance, grow, scale2, num_tiles, num_heads, layout_heads, sequences, query_length, key_length, stride_qb,
    stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh,
    stride_on, stride_mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUB_M: tl.constexpr, SUB_N: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr, RANK_MAJOR: tl.constexpr,
    HAS_BITS: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Compute the attention output and the log-sum-exp of the scores for one tile of queries."""
    seed = tl.load(seed) if HAS_DROPOUT else 0
    sequence, batch, head, tile, begin, near, after, end, key_mask, query_segments, key_segments = list_of(
        ranges, order, num_tiles, num_heads, layout_heads, sequences, key_mask, query_segments, key_segments,
        stride_mask, query_length, key_length, BLOCK_M, BLOCK_N, RANK_MAJOR, HAS_PADDING, HAS_SEGMENTS, SKIPS, False,
    )  # fmt: skip
    table, left, right = values_of(table, head, WIDTH, BIAS, False)
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_base = q + batch * stride_qb + head * stride_qh
    q_tile = load_rows(q_base, tile, BLOCK_M, stride_qn, query_length, HEAD_DIM, BLOCK_D, EVEN_M)
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for NEAR in tl.static_range(2 if BIAS == T5 or CAUSAL else 1):
        steps, first_steps, first, second = steps_of(begin, near, after, end, NEAR)
        for step in tl.range(0, steps, num_stages=2 if NEAR else STAGES):
            key_tile, bits = tile_at(step, first_steps, first, second, tiles, tile_bits, DENSE, HAS_BITS)
            k_tile = load_rows(k, key_tile, BLOCK_N, stride_kn, key_length, HEAD_DIM, BLOCK_D, EVEN_N)
            scores = scores_by_query(
                q_tile, k_tile, 0.0, scale2, table, tl.where(step < first_steps, left, right), key_mask, tile,
                key_tile, bits, query_segments, key_segments, query_length, key_length, WIDTH, BIAS, NEAR, CAUSAL,
                HAS_BITS, SUB_M, SUB_N, BLOCK_M, BLOCK_N, HAS_PADDING, HAS_SEGMENTS, False, PRECISION,
            )  # fmt: skip
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - finite_peak[:, None])
            shrink = tl.exp2(peak - finite_peak)
            total = total * shrink + tl.sum(weights, 1)
            if HAS_DROPOUT:
                keep = is_kept(seed, sequence, drop_below, drop_chance, tile, key_tile, BLOCK_M, BLOCK_N, False)
                weights = tl.where(keep, weights, 0.0)
            v_tile = load_rows(v, key_tile, BLOCK_N, stride_vn, key_length, VALUE_DIM, BLOCK_V, EVEN_N)
            output = tl.dot(weights.to(v_tile.dtype), v_tile, output * shrink[:, None], input_precision=PRECISION)
            peak = new_peak
    nothing = total == 0.0
    output = output * (grow / tl.where(nothing, 1.0, total))[:, None]
    o_base = o + batch * stride_ob + head * stride_oh
    store_rows(o_base, output, queries, stride_on, query_length, VALUE_DIM, BLOCK_V)
    logarithm = tl.where(nothing, float("inf"), peak + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(lse + sequence.to(tl.int64) * query_length + queries, logarithm, mask=queries < query_length)


@triton.jit
def add_far(sums, ds, queries, key_tile, is_left, sides, BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """Add up the position bias's gradient from a tile far from the diagonal, in `sums` [rows, 16].

    `ds` is the gradient of the tile's scores. For T5, column 0 sums tiles left of the diagonal and column 1 those
    right of it. For ALiBi, all columns together sum -distance * ds.
    """
    rows: tl.constexpr = ds.shape[0]
    columns: tl.constexpr = ds.shape[1]
    if BIAS == ALIBI:
        keys = key_tile * columns + tl.arange(0, columns)
        distances = tl.abs(keys[None, :].to(tl.float32) - queries[:, None].to(tl.float32))
        sums -= tl.sum(tl.reshape(ds * distances, [rows, columns // 16, 16]), 1)
    else:
        sides += tl.where(is_left, 0, columns * 16)
        ones = tl.load(sides + (tl.arange(0, columns)[:, None] * 16 + tl.arange(0, 16)[None, :]))
        sums = tl.dot(ds.to(ones.dtype), ones, sums, input_precision=PRECISION)
    return sums


@triton.jit
def add_near(sums, ds, places, shift, SUM_ROWS: tl.constexpr, MICRO: tl.constexpr, PRECISION: tl.constexpr):
    """Add up the T5 bias's gradient from a tile near the diagonal, in `sums` [SUM_ROWS, MICRO ** 2] (see `Diagonals`).

    `ds` is the gradient of the tile's scores. `places` is a matrix of 0 and 1 with a row for each diagonal and a
    column for each block of a tile, so the sums are one product on the tensor cores. `shift` is the tile's distance
    from the leftmost one, in blocks.
    """
    rows: tl.constexpr = ds.shape[0] // MICRO
    columns: tl.constexpr = ds.shape[1] // MICRO
    blocks = tl.permute(tl.reshape(ds, [rows, MICRO, columns, MICRO]), [0, 2, 1, 3])
    blocks = tl.reshape(blocks, [rows * columns, MICRO * MICRO])
    diagonals, blocks_of = tl.arange(0, SUM_ROWS), tl.arange(0, rows * columns)
    places += (SUM_ROWS - shift) * (rows * columns)
    selected = tl.load(places + (diagonals[:, None] * (rows * columns) + blocks_of[None, :]))
    return tl.dot(selected, blocks, sums, input_precision=PRECISION)


@triton.jit
def store_near(near_sums, sums, SUM_ROWS: tl.constexpr, MICRO: tl.constexpr, PRECISION: tl.constexpr):
    """Reduce the T5 bias's gradient from sums by diagonal of blocks to sums by distance, and store them.

    In row d of the result are the distances MICRO * d + 0..2 * MICRO - 2.
    """
    places, diagonals = tl.arange(0, MICRO * MICRO)[:, None], tl.arange(0, 16)[None, :]
    fold = (places % MICRO - places // MICRO + MICRO - 1 == diagonals).to(tl.float32)
    total = tl.dot(sums, fold, input_precision=PRECISION)
    tl.store(near_sums + tl.arange(0, SUM_ROWS)[:, None] * 16 + diagonals, total)


@triton.jit
def pair_of(pairs, places, inside, EVEN: tl.constexpr):
    """Load -lse and delta of queries, which `rows_of` has stored as pairs; -inf and 0 beyond the last query."""
    here = pairs + (places[:, None] * 2 + tl.arange(0, 2)[None, :])
    if EVEN:
        base, delta = tl.split(tl.load(here))
    else:
        base, delta = tl.split(tl.load(here, mask=inside[:, None], other=0.0))
        base = tl.where(inside, base, float("-inf"))
    return base, delta


@triton.jit
def rows_of(
    o, do, lse, pairs, sequence, tile, left, right, stride, query_length, BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, EVEN_M: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Load what the backward pass needs of a tile of queries: do, delta = sum(o * do), and -lse.

    `do` is the gradient of the output o, and `lse` the log-sum-exp of the scores. Pairs of -lse and delta are also
    stored for `key_gradient_kernel`, which loads a tile of them at once. T5 has two more copies of the pairs,
    whose -lse has the far biases added.
    """
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_tile = load_rows(o, tile, BLOCK_M, stride, query_length, VALUE_DIM, BLOCK_V, EVEN_M)
    do_tile = load_rows(do, tile, BLOCK_M, stride, query_length, VALUE_DIM, BLOCK_V, EVEN_M)
    rows, inside = sequence.to(tl.int64) * query_length + queries, queries < query_length
    row_less = -tl.load(lse + rows, mask=inside, other=float("inf"))
    row_delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    pairs += sequence.to(tl.int64) * ((6 if BIAS == T5 else 2) * query_length) + queries * 2
    tl.store(pairs, row_less, mask=inside)
    tl.store(pairs + 1, row_delta, mask=inside)
    if BIAS == T5:
        tl.store(pairs + 2 * query_length, row_less + left, mask=inside)
        tl.store(pairs + 2 * query_length + 1, row_delta, mask=inside)
        tl.store(pairs + 4 * query_length, row_less + right, mask=inside)
        tl.store(pairs + 4 * query_length + 1, row_delta, mask=inside)
    return do_tile, row_delta, row_less


@triton.jit
def window_of(windows, of_tile, window, near, after, NUM_WINDOWS: tl.constexpr):
    """(begin, end) of one window of distances (see `Diagonals`) in a program's list of tiles near the diagonal."""
    begin, end = near, after
    if NUM_WINDOWS > 1:
        windows += of_tile * (NUM_WINDOWS + 1) + window
        begin, end = within(near, after, tl.load(windows)), within(near, after, tl.load(windows + 1))
    return begin, end


@triton.jit
def gradient_by_query(
    q_tile, k_tile, v_tile, do_tile, row_less, row_delta, grow, seed, sequence, drop_below, drop_chance, scale2, table,
    value, key_mask, tile, key_tile, bits, query_segments, key_segments, query_length, key_length, WIDTH: tl.constexpr,
    BIAS: tl.constexpr, NEAR: tl.constexpr, CAUSAL: tl.constexpr, HAS_BITS: tl.constexpr, SUB_M: tl.constexpr,
    SUB_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PADDING: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the attention scores of a tile, [BLOCK_M queries, BLOCK_N keys]."""
    scores = scores_by_query(
        q_tile, k_tile, row_less[:, None], scale2, table, value, key_mask, tile, key_tile, bits, query_segments,
        key_segments, query_length, key_length, WIDTH, BIAS, NEAR, CAUSAL, HAS_BITS, SUB_M, SUB_N, BLOCK_M, BLOCK_N,
        HAS_PADDING, HAS_SEGMENTS, True, PRECISION,
    )  # fmt: skip
    _, ds = gradient_of(
        tl.exp2(scores), tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION), row_delta[:, None], grow, seed,
        sequence, drop_below, drop_chance, tile, key_tile, BLOCK_M, BLOCK_N, False, HAS_DROPOUT,
    )  # fmt: skip
    return ds


@triton.jit(do_not_specialize=VARYING)
def query_gradient_kernel(
    q, k, v, o, do, lse, dq, far_sums, near_sums, sides, places, windows, pairs, table, key_mask, query_segments,
    key_segments, ranges, order, tiles, tile_bits, seed, drop_below, drop_chance, grow, scale, scale2, num_tiles,
    num_heads, layout_heads, sequences, query_length, key_length, stride_qb, stride_qh, stride_qn, stride_kb,
    stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on, stride_mask, stride_dq,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUB_M: tl.constexpr, SUB_N: tl.constexpr, WIDTH: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr, RANK_MAJOR: tl.constexpr, HAS_BITS: tl.constexpr,
    HAS_PADDING: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_DROPOUT: tl.constexpr, TRAIN_BIAS: tl.constexpr,
    LEFTMOST: tl.constexpr, WINDOW: tl.constexpr, NUM_WINDOWS: tl.constexpr, SUM_ROWS: tl.constexpr,
    MICRO: tl.constexpr, FOLD: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Compute dq for a tile of queries, sums of the bias gradient, and the values that `rows_of` stores."""
    seed = tl.load(seed) if HAS_DROPOUT else 0
    sequence, batch, head, tile, begin, near, after, end, key_mask, query_segments, key_segments = list_of(
        ranges, order, num_tiles, num_heads, layout_heads, sequences, key_mask, query_segments, key_segments,
        stride_mask, query_length, key_length, BLOCK_M, BLOCK_N, RANK_MAJOR, HAS_PADDING, HAS_SEGMENTS, SKIPS, False,
    )  # fmt: skip
    table, left, right = values_of(table, head, WIDTH, BIAS, False)
    k, v = k + batch * stride_kb + head * stride_kh, v + batch * stride_vb + head * stride_vh
    of_query, of_output = batch * stride_qb + head * stride_qh, batch * stride_ob + head * stride_oh
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_tile = load_rows(q + of_query, tile, BLOCK_M, stride_qn, query_length, HEAD_DIM, BLOCK_D, EVEN_M)
    do_tile, row_delta, row_less = rows_of(
        o + of_output, do + of_output, lse, pairs, sequence, tile, left, right, stride_on, query_length,
        BLOCK_M, VALUE_DIM, BLOCK_V, EVEN_M, BIAS,
    )  # fmt: skip
    gradient, row_sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, 16], tl.float32)
    TRAIN_T5: tl.constexpr = TRAIN_BIAS and BIAS == T5
    for NEAR in tl.static_range(2 if BIAS == T5 or CAUSAL else 1):
        for window in tl.range(0, NUM_WINDOWS if TRAIN_T5 and NEAR else 1):
            window_begin, window_end = window_of(
                windows, (head % layout_heads) * num_tiles + tile, window, near, after,
                NUM_WINDOWS if TRAIN_T5 and NEAR else 1,
            )  # fmt: skip
            steps, first_steps, first, second = steps_of(begin, window_begin, window_end, end, NEAR)
            sums = tl.zeros([SUM_ROWS, MICRO * MICRO], tl.float32)
            for step in tl.range(0, steps, num_stages=2 if NEAR else STAGES):
                key_tile, bits = tile_at(step, first_steps, first, second, tiles, tile_bits, DENSE, HAS_BITS)
                k_tile = load_rows(k, key_tile, BLOCK_N, stride_kn, key_length, HEAD_DIM, BLOCK_D, EVEN_N)
                v_tile = load_rows(v, key_tile, BLOCK_N, stride_vn, key_length, VALUE_DIM, BLOCK_V, EVEN_N)
                ds = gradient_by_query(
                    q_tile, k_tile, v_tile, do_tile, row_less, row_delta, grow, seed, sequence, drop_below,
                    drop_chance, scale2, table, tl.where(step < first_steps, left, right), key_mask, tile, key_tile,
                    bits, query_segments, key_segments, query_length, key_length, WIDTH, BIAS, NEAR, CAUSAL, HAS_BITS,
                    SUB_M, SUB_N, BLOCK_M, BLOCK_N, HAS_PADDING, HAS_SEGMENTS, HAS_DROPOUT, PRECISION,
                )  # fmt: skip
                gradient = tl.dot(ds.to(k_tile.dtype), k_tile, gradient, input_precision=PRECISION)
                if TRAIN_T5 and NEAR:
                    shift = (key_tile * BLOCK_N - tile * BLOCK_M - LEFTMOST - window * WINDOW) // MICRO
                    sums = add_near(sums, ds.to(k_tile.dtype), places, shift, SUM_ROWS, MICRO, PRECISION)
                elif TRAIN_BIAS:
                    row_sums = add_far(row_sums, ds, queries, key_tile, step < first_steps, sides, BIAS, PRECISION)
            if TRAIN_T5 and NEAR:
                program = (sequence.to(tl.int64) * num_tiles + tile) * NUM_WINDOWS + window
                store_near(near_sums + program * (SUM_ROWS * 16), sums, SUM_ROWS, MICRO, FOLD)
    store_by_token(dq, gradient * scale, queries, batch, head, stride_dq, query_length, HEAD_DIM, BLOCK_D)
    if TRAIN_BIAS:
        tl.store(far_sums + (sequence.to(tl.int64) * num_tiles + tile) * 16 + tl.arange(0, 16), tl.sum(row_sums, 0))


# The first run of a key tile's list holds the queries that have this tile on their far right.
@triton.jit(do_not_specialize=VARYING)
def key_gradient_kernel(
    q, k, v, do, pairs, dk, dv, table, key_mask, query_segments, key_segments, ranges, order, tiles, tile_bits, seed,
    drop_below, drop_chance, grow, scale, scale2, num_tiles, num_heads, layout_heads, sequences, query_length,
    key_length, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_mask, stride_dk, stride_dv, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUB_M: tl.constexpr,
    SUB_N: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DENSE: tl.constexpr,
    RANK_MAJOR: tl.constexpr, HAS_BITS: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dk and dv for one tile of keys. Scores are computed as [keys, queries]."""
    seed = tl.load(seed) if HAS_DROPOUT else 0
    sequence, batch, head, tile, begin, near, after, end, key_mask, query_segments, key_segments = list_of(
        ranges, order, num_tiles, num_heads, layout_heads, sequences, key_mask, query_segments, key_segments,
        stride_mask, query_length, key_length, BLOCK_M, BLOCK_N, RANK_MAJOR, HAS_PADDING, HAS_SEGMENTS, SKIPS, True,
    )  # fmt: skip
    table, left, right = values_of(table, head, WIDTH, BIAS, True)
    q += batch * stride_qb + head * stride_qh
    do += batch * stride_ob + head * stride_oh
    pairs += sequence.to(tl.int64) * ((6 if BIAS == T5 else 2) * query_length)
    of_key, of_value = batch * stride_kb + head * stride_kh, batch * stride_vb + head * stride_vh
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k + of_key, tile, BLOCK_N, stride_kn, key_length, HEAD_DIM, BLOCK_D, EVEN_N)
    v_tile = load_rows(v + of_value, tile, BLOCK_N, stride_vn, key_length, VALUE_DIM, BLOCK_V, EVEN_N)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for NEAR in tl.static_range(2 if BIAS == T5 or CAUSAL else 1):
        steps, first_steps, first, second = steps_of(begin, near, after, end, NEAR)
        for step in tl.range(0, steps, num_stages=2 if NEAR else STAGES):
            query_tile, bits = tile_at(step, first_steps, first, second, tiles, tile_bits, DENSE, HAS_BITS)
            queries = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
            inside = queries < query_length
            q_tile = load_rows(q, query_tile, BLOCK_M, stride_qn, query_length, HEAD_DIM, BLOCK_D, EVEN_M)
            do_tile = load_rows(do, query_tile, BLOCK_M, stride_on, query_length, VALUE_DIM, BLOCK_V, EVEN_M)
            added = tl.where(step < first_steps, 2, 1) * query_length if BIAS == T5 and NEAR == 0 else 0
            base, row_delta = pair_of(pairs, added + queries, inside, EVEN_M)
            base = base[None, :]
            value = tl.where(step < first_steps, right, left)
            if BIAS == T5 and NEAR:
                base += bias_of(table, query_tile * BLOCK_M - tile * BLOCK_N, WIDTH, BLOCK_N, BLOCK_M)
            scores = score(
                tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION), scale2, base, value,
                queries[None, :], keys[:, None], bits, query_segments, key_segments, query_length, key_length,
                BIAS, NEAR, CAUSAL, HAS_BITS, SUB_M, SUB_N, BLOCK_M, BLOCK_N, HAS_SEGMENTS,
            )  # fmt: skip
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            dropped, ds = gradient_of(
                tl.exp2(scores), dp, row_delta[None, :], grow, seed, sequence, drop_below, drop_chance, query_tile,
                tile, BLOCK_M, BLOCK_N, True, HAS_DROPOUT,
            )  # fmt: skip
            dv_tile = tl.dot(dropped.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
            dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)
    if HAS_PADDING:  # until here nothing of a key reached another
        seen = (tl.load(key_mask + keys) == 0.0)[:, None]
        dk_tile, dv_tile = tl.where(seen, dk_tile, 0.0), tl.where(seen, dv_tile, 0.0)
    store_by_token(dk, dk_tile * scale, keys, batch, head, stride_dk, key_length, HEAD_DIM, BLOCK_D)
    store_by_token(dv, dv_tile * grow, keys, batch, head, stride_dv, key_length, VALUE_DIM, BLOCK_V)
