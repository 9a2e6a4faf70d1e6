"""block_sparse_attention on the CPU: exact against the definition in float64, repeatable, linear in memory, clear."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.t5.modeling_t5 import T5Attention

from lm_experiments_tools.attention import AlibiBias, Layout, T5Bias, alibi_slopes, block_sparse_attention
from lm_experiments_tools.attention.kernels import layout_cache
from lm_experiments_tools.attention.kernels.bias import T5Table, dense_bias, t5_bucket
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig, LocalSlidingWindowSparsityConfig
from tests.helpers.attention_cases import Case, errors, tensors

SELF = [("bigbird", 70, 70), ("longformer", 70, 70), ("random", 64, 64), ("dense", 70, 70)]
CROSS = [("random", 70, 45), ("shared", 33, 64), ("dense", 20, 70)]


def settings(*names: str) -> Iterator[dict[str, bool]]:
    for values in itertools.product([False, True], repeat=len(names)):
        yield dict(zip(names, values, strict=True))


# Exactness


@pytest.mark.parametrize(("layout", "query_length", "key_length"), SELF + CROSS)
def test_blocks_are_exact_with_a_t5_bias(layout, query_length, key_length):
    block = 8 if query_length == 70 else 16
    for chosen in settings("padding", "causal", "segments"):
        dropout_p = 0.25 if chosen["padding"] != chosen["causal"] else 0.0
        case = Case(layout, block, query_length, key_length, dropout_p=dropout_p, **chosen)
        assert max(errors(case, "blocks").values()) < 1e-10, case


@pytest.mark.parametrize("bias", ["t5 decoder", "alibi", "matrix", "none"])
@pytest.mark.parametrize(("layout", "query_length", "key_length"), [SELF[0], CROSS[0], SELF[3]])
def test_blocks_are_exact_with_every_bias(layout, query_length, key_length, bias):
    for chosen in settings("padding", "causal"):
        case = Case(layout, 16, query_length, key_length, bias, segments=True, dropout_p=0.25, value_dim=5, **chosen)
        assert max(errors(case, "blocks").values()) < 1e-10, case


@pytest.mark.parametrize("bias", ["t5", "alibi", "matrix", "none"])
@pytest.mark.parametrize(("layout", "query_length", "key_length"), [SELF[0], CROSS[0], SELF[3]])
def test_sdpa_is_exact(layout, query_length, key_length, bias):
    for chosen in settings("padding", "causal", "segments"):
        case = Case(layout, 16, query_length, key_length, bias, **chosen)
        assert max(errors(case, "sdpa").values()) < 1e-10, case


@pytest.mark.parametrize("length", [1, 17])
def test_any_length_down_to_one_token(length):
    for layout in ("bigbird", "dense"):
        case = Case(layout, 16, length, length)
        assert max(errors(case, "blocks").values()) < 1e-10
        assert max(errors(case, "sdpa").values()) < 1e-10


def test_gradcheck_with_dropout_padding_and_bias():
    q, k, v = tensors(1, 2, 8, 2)
    (weight,) = tensors(8, 2, count=1)
    layout = Layout(torch.tensor([[[1, 0, 1], [1, 1, 0], [0, 1, 1]]]), 3)
    mask = torch.tensor([[True] * 6 + [False] * 2])

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(0)
        bias = T5Bias(weight, num_buckets=8, max_distance=6)
        return block_sparse_attention(q, k, v, layout, bias, mask, dropout_p=0.3, backend="blocks")

    assert torch.autograd.gradcheck(call, (q, k, v, weight))


def test_inputs_may_be_views_and_the_output_has_the_dtype_of_q():
    q, k, v = (x.detach().transpose(1, 2) for x in tensors(2, 40, 2, 8, dtype=torch.bfloat16))
    plain = block_sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="blocks")
    viewed = block_sparse_attention(q, k, v, backend="blocks")
    assert viewed.dtype == torch.bfloat16 and torch.equal(plain, viewed)


@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
@pytest.mark.parametrize(("dtype", "band"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 2e-6)])
def test_error_stays_within_the_rounding_of_the_dtype(dtype, band, backend):
    case = Case("bigbird", 16, 100, 100, padding=True, head_dim=16)
    assert max(errors(case, backend, dtype).values()) < band


@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
def test_autocast_changes_nothing(backend):
    q, k, v = tensors(1, 2, 40, 8, dtype=torch.float32)
    bias = T5Bias(torch.randn(32, 2))
    plain = block_sparse_attention(q, k, v, None, bias, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        cast = block_sparse_attention(q, k, v, None, bias, backend=backend)
        (gradient,) = torch.autograd.grad(cast.sum(), q)
    assert cast.dtype == torch.float32 and torch.equal(plain, cast)
    assert torch.equal(gradient, torch.autograd.grad(plain.sum(), q)[0])


# The bias


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 512)])
def test_buckets_are_those_of_transformers_and_the_table_holds_all_distances(bidirectional, num_buckets, max_distance):
    distances = torch.arange(-1000, 1001)
    expected = T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance)
    assert torch.equal(t5_bucket(distances, bidirectional, num_buckets, max_distance), expected)
    table = T5Bias(torch.arange(num_buckets)[:, None].double(), bidirectional, num_buckets, max_distance).table()
    saturation = table.shape[1] // 2
    assert saturation <= max_distance and table[0, 0] != table[0, 1]
    assert torch.equal(table[0, distances.clamp(-saturation, saturation) + saturation].long(), expected)


@pytest.mark.parametrize("backend", ["blocks", "sdpa", "eager"])
def test_a_table_computed_once_for_several_layers_is_the_bias_that_it_was_made_of(backend):
    q, k, v = (torch.randn(2, 3, 150, 8, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(32, 3, dtype=torch.float64, requires_grad=True)
    bias = T5Bias(weight)
    results = []
    for given in (bias, T5Table(bias.table().contiguous())):
        output = block_sparse_attention(q, k, v, None, given, backend=backend)
        results.append((output, torch.autograd.grad(output.square().sum(), weight)[0]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2**-n for n in range(1, 9)]
    assert alibi_slopes(16)[:3].tolist() == pytest.approx([2**-0.5, 2**-1, 2**-1.5])
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2**-n for n in range(1, 9)] + [2 ** -(n + 0.5) for n in range(4)]
    )
    assert dense_bias(AlibiBias(torch.tensor([2.0])), 2, 3).tolist() == [[[[0, -2, -4], [-2, 0, -2]]]]


# What the masks mean


def test_packed_documents_are_as_if_each_were_alone():
    lengths = [37, 5, 60, 26]
    q, k, v = tensors(1, 2, sum(lengths), 8)
    bias = T5Bias(torch.randn(32, 2, dtype=torch.float64))
    ids = torch.repeat_interleave(torch.tensor(lengths)).add(3)[None]
    packed = block_sparse_attention(q, k, v, None, bias, segment_ids=ids, causal=True, backend="blocks")
    parts = [
        block_sparse_attention(*(x[:, :, end - n : end] for x in (q, k, v)), None, bias, causal=True)
        for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(parts, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["blocks", "sdpa", "eager"])
def test_queries_that_may_attend_to_nothing_give_zeros_and_get_none(backend):
    q, k, v = tensors(2, 2, 40, 8)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1] = False
    blocks = torch.ones(1, 3, 3, dtype=torch.bool)
    blocks[:, 1] = False
    weight = torch.randn(32, 2, dtype=torch.float64, requires_grad=True)
    output = block_sparse_attention(q, k, v, Layout(blocks, 16), T5Bias(weight), mask, backend=backend)
    dead = torch.zeros(2, 40, dtype=torch.bool)
    dead[1], dead[0, 16:32] = True, True
    nothing = dead[:, None, :, None].expand_as(output)
    assert (output[nothing] == 0).all() and (output[~nothing] != 0).all()
    dq, dk, dv, dw = torch.autograd.grad(output.sum() + output.square().sum(), [q, k, v, weight])
    assert (dq[nothing] == 0).all() and (dk[1] == 0).all() and (dv[1] == 0).all() and dw.isfinite().all()


@pytest.mark.parametrize(
    ("backend", "masked"),
    [*itertools.product(["blocks", "sdpa", "eager"], [False, True])],
)
def test_a_bias_of_minus_infinity_takes_keys_out_and_a_row_of_them_gives_zeros(masked, backend):
    """Against the definition written out, over the keys that are left; also where a mask takes the last of them."""
    q, k, v = tensors(2, 2, 40, 16, seed=4)
    (bias,) = tensors(2, 2, 40, 40, count=1)
    keep = torch.ones(2, 40, dtype=torch.bool)
    with torch.no_grad():
        bias[0, 0, 3] = bias[1, 0, 39] = bias[0, 1, 7, :20] = bias[1, 1, :, 5] = bias[1, 0, 9, :30] = -torch.inf
        keep[1, 30:] = not masked
    left = ~bias.detach().isneginf() & keep[:, None, None, :]
    weights = torch.where(left, (q @ k.mT / 4 + bias).exp(), 0.0)
    expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v
    alive = left.any(-1, keepdim=True).expand_as(expected)
    assert (~alive).any(-1).sum() == (3 if masked else 2)
    leaves = [q, k, v, bias]
    layout = Layout(torch.ones(1, 5, 5), 8)  # that is filled, or padding would be masked
    output = block_sparse_attention(*leaves[:3], layout, leaves[3], keep if masked else None, backend=backend)
    assert (output[~alive] == 0).all()
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (output, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# Dropout


def weights_of(q: Tensor, k: Tensor, seed: int, **keywords: object) -> Tensor:
    """Attention weights after dropout, read off by attending to an identity."""
    identity = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    torch.manual_seed(seed)
    return block_sparse_attention(q, k, identity, **keywords).detach()


@pytest.mark.parametrize("backend", ["blocks", "eager", "sdpa"])
def test_dropout_drops_each_weight_with_probability_p_and_scales_the_rest(backend):
    q, k, _ = tensors(3, 2, 100, 8)
    plain = weights_of(q, k, 0, backend=backend)
    dropped = weights_of(q, k, 0, dropout_p=0.3, backend=backend)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.7, rtol=1e-4, atol=0)
    spread = math.sqrt(0.3 * 0.7)
    assert abs(kept.double().mean() - 0.7) < 5 * spread / kept.numel() ** 0.5
    # No row, column or head is dropped more than others, and no two rows alike.
    for dims, size in (((0, 1, 2), 600), ((0, 1, 3), 600), ((2, 3), 10_000)):
        assert (kept.double().mean(dims) - 0.7).abs().max() < 5 * spread / size**0.5
    assert len(kept.flatten(0, 2).unique(dim=0)) == 600


def test_dropout_follows_torchs_seed_and_not_the_head_dimension():
    q, k, _ = tensors(2, 2, 100, 8)
    layout = LocalSlidingWindowSparsityConfig(2, block=16, attention="bidirectional")
    keywords = {"layout": layout, "dropout_p": 0.5, "backend": "blocks"}
    first = weights_of(q, k, 1, **keywords) != 0
    assert torch.equal(first, weights_of(q, k, 1, **keywords) != 0)
    assert torch.equal(first, weights_of(q.repeat(1, 1, 1, 3), k.repeat(1, 1, 1, 3), 1, **keywords) != 0)
    assert not torch.equal(first, weights_of(q, k, 2, **keywords) != 0)


# Same bits, memory, lists that are kept


def test_two_runs_are_equal_bit_for_bit():
    q, k, v = tensors(2, 2, 200, 16, dtype=torch.float32)
    (weight,) = tensors(32, 2, count=1, dtype=torch.float32)
    mask = torch.rand(2, 200) < 0.8

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        output = block_sparse_attention(
            q, k, v, BigBirdSparsityConfig(2, block=16), T5Bias(weight), mask, dropout_p=0.1, backend="blocks"
        )
        return [output, *torch.autograd.grad(output.square().sum(), [q, k, v, weight])]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [run() for _ in range(2)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("layout", [None, BigBirdSparsityConfig(1, block=64)])
def test_no_tensor_is_as_large_as_the_score_matrix(layout):
    length = 4096
    q, k, v = tensors(1, 1, length, 8, dtype=torch.float32)
    (weight,) = tensors(32, 1, count=1, dtype=torch.float32)
    with LargestTensor() as mode:
        output = block_sparse_attention(q, k, v, layout, T5Bias(weight), backend="blocks")
        torch.autograd.grad(output.sum(), [q, k, v, weight])
    assert mode.numel <= 64 * length


def test_lists_go_with_their_layout():
    q, k, v = (x.detach() for x in tensors(1, 2, 64, 8))
    layout = Layout(torch.zeros(1, 4, 4, dtype=torch.bool), 16)
    assert (block_sparse_attention(q, k, v, layout) == 0).all()
    gone, key = weakref.ref(layout), id(layout)
    assert key in layout_cache._cache
    del layout
    gc.collect()
    assert gone() is None and key not in layout_cache._cache


@pytest.mark.parametrize("layout", [None, LocalSlidingWindowSparsityConfig(1, block=16)], ids=["dense", "local"])
def test_lists_are_kept_for_the_lengths_used_last(layout, monkeypatch):
    monkeypatch.setattr(layout_cache, "_MAX_CACHED", 4)

    def attend(length: int) -> object:
        (q,) = tensors(1, 1, length, 4, count=1)
        block_sparse_attention(q, q, q, layout, backend="blocks")
        return layout_cache.resolve_layout(layout, 1, length, length)

    known = len(layout_cache._cache)
    kept = attend(7)
    for length in range(65, 600, 64):
        attend(length)
        assert attend(7) is kept  # used all along
    assert len(layout_cache._cache) <= known + 5
    owner = layout_cache._DENSE if layout is None else layout
    assert len(layout_cache._cache[id(owner)]) == 4
