"""The backend that "auto" takes, and arguments that are refused with a sentence."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lm_experiments_tools.attention import Layout, T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels import call, layout_cache, tiles, triton
from lm_experiments_tools.attention.kernels.call import AttentionInputs, AttentionSpec, validate
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig, LocalSlidingWindowSparsityConfig
from lm_experiments_tools.errors import UserError


def test_auto_takes_what_is_fast():
    def taken(length: int, layout: object = None, bias: object = None, causal: bool = False) -> str:
        q = torch.empty(1, 2, length, 64)
        inputs = validate(AttentionInputs(q, q, q, AttentionSpec(bias=bias, layout=layout, causal=causal)))
        return call.choose(inputs, "auto").__name__.rpartition(".")[2]

    learned, frozen = T5Bias(torch.zeros(32, 2, requires_grad=True)), T5Bias(torch.zeros(32, 2))
    bigbird = BigBirdSparsityConfig(2, block=64)
    assert taken(256, bigbird, learned) == taken(512, None, learned) == taken(1024, None, learned) == "sdpa"
    assert taken(1024, bigbird, learned) == "blocks"
    assert taken(4096) == taken(1024, None, frozen) == taken(16384, causal=True) == "sdpa"
    assert taken(2048, None, learned) == taken(4096, bigbird) == taken(4096, bigbird, frozen) == "blocks"
    assert taken(512, LocalSlidingWindowSparsityConfig(2, block=64, num_sliding_window_blocks=15)) == "sdpa"
    assert taken(16384, None, frozen) == "blocks"


def test_a_bias_given_as_a_matrix_is_dense_on_a_gpu():
    """Not split into blocks, which are thousands of calls a layer."""
    q = torch.empty(8, 12, 512, 64, dtype=torch.bfloat16)
    spec = AttentionSpec(layout=BigBirdSparsityConfig(12, block=64), bias=torch.empty(1, 12, 512, 512))
    assert call._choose_on_gpu(validate(AttentionInputs(q, q, q, spec))).__name__.endswith("sdpa")


L4 = tiles.Card("NVIDIA L4", (8, 9), 99 << 10)


def test_tiles_that_were_measured_on_a_card_are_those_that_it_takes(monkeypatch):
    default, found = tiles.tile_of("forward", 64, None, 2, L4), tiles.Tile(64, 32, 4, 2)
    monkeypatch.setitem(tiles.MEASURED, (L4.capability, 2), {("forward", 64): found})
    assert tiles.tile_of("forward", 64, None, 2, L4) == tiles.tile_of("forward", 48, None, 2, L4) == found != default
    other = L4._replace(capability=(8, 6))
    assert tiles.tile_of("forward", 64, None, 2, other) == tiles.tile_of("forward", 64, None, 2) == default
    assert tiles.tile_of("query_gradient", 64, None, 2, L4) == tiles.tile_of("query_gradient", 64, None, 2)
    assert tiles.tile_of("forward", 64, None, 4, L4) == tiles.tile_of("forward", 64, None, 4)


CARDS = {
    "Tesla T4": ((7, 5), 64 << 10), "NVIDIA L4": ((8, 9), 99 << 10), "NVIDIA H100": ((9, 0), 227 << 10),
}  # fmt: skip


@pytest.mark.parametrize(
    ("card", "head_dim", "dtype", "sentence"),
    [
        ("Tesla T4", 64, torch.float16, "Tesla T4 has compute capability 7.5, and Triton needs 8.0"),
        ("NVIDIA L4", 256, torch.bfloat16, "head_dim above 128 takes 109 KiB of shared memory, and NVIDIA L4 has 99"),
        ("NVIDIA L4", 128, torch.bfloat16, None),
        ("NVIDIA H100", 256, torch.bfloat16, None),
    ],
)
def test_a_card_that_cannot_run_the_kernels_is_told_once_and_served(
    card, head_dim, dtype, sentence, monkeypatch, caplog
):
    pytest.importorskip("triton")
    monkeypatch.setattr(triton, "card_of", lambda device: tiles.Card(card, *CARDS[card]))
    call._warn_once.cache_clear()
    with FakeTensorMode():
        q = torch.empty(2, 4, 512, head_dim, dtype=dtype, device="cuda", requires_grad=True)
        weight = torch.empty(32, 4, device="cuda", requires_grad=True)
    layout = layout_cache.resolve_layout(BigBirdSparsityConfig(4, block=64), 4, 512, 512)
    inputs = AttentionInputs(q, q, q, AttentionSpec(layout=layout, bias=T5Bias(weight), scale=1.0))
    for _ in range(2):
        module = call.choose(inputs, "auto")
    if sentence is None:
        assert module is triton and not caplog.records
        return
    assert module is call.BACKENDS["sdpa"] and len(caplog.records) == 1
    assert sentence in caplog.text
    with pytest.raises(UserError, match=f'backend "triton" cannot do this: .*{sentence}'):
        call.choose(inputs, "triton")


Q = torch.zeros(2, 4, 32, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", Q[0]), ("q", Q.long()), ("k", Q[:, :2]), ("v", Q[:, :, :31]), ("v", Q.double()), ("backend", "cuda"),
        ("backend", "triton"), ("bias", "alibi"), ("bias", T5Bias(torch.zeros(32, 3))),
        ("bias", torch.zeros(4, 32, 32)),
        ("key_padding_mask", torch.ones(2, 32, device="meta").bool()), ("key_padding_mask", torch.ones(2, 32)),
        ("key_padding_mask", torch.ones(2, 31).bool()), ("segment_ids", torch.ones(2, 32).bool()),
        ("segment_ids", torch.ones(2, 30).long()), ("layout", "bigbird"), ("layout", BigBirdSparsityConfig),
        ("layout", torch.ones(2, 2)), ("layout", Layout(torch.ones(3, 2, 2), 16)),
        ("layout", Layout(torch.ones(4, 2, 2), 8)),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"(?i){name}"):
        block_sparse_attention(**{"q": Q, "k": Q, "v": Q, name: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"q": Q[:, :, :8], "segment_ids": torch.zeros(2, 8, dtype=torch.long)},
        {"q": Q[:, :, :8], "layout": BigBirdSparsityConfig(4)},
    ],
)
def test_lengths_and_devices_that_do_not_fit_are_refused(arguments):
    with pytest.raises(UserError):
        block_sparse_attention(**{"q": Q, "k": Q, "v": Q, **arguments})


@pytest.mark.parametrize(
    "make",
    [
        lambda: T5Bias(torch.zeros(16, 4)),
        lambda: T5Bias(torch.zeros(32, 4), max_distance=8),
        lambda: Layout(torch.zeros(2, 2), 16),
        lambda: Layout(torch.ones(1, 2, 2, device="meta"), 16),
    ],
)
def test_biases_and_layouts_that_make_no_sense_are_refused(make):
    with pytest.raises(UserError):
        make()


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "blocks", "triton"])
def test_softcap_is_computed_by_its_definition_or_refused(backend: str) -> None:
    q, k, v = 3 * torch.randn(3, 2, 4, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = AttentionInputs(q, k, v, AttentionSpec(causal=True, scale=0.5, softcap=2.0))
    if backend not in ("auto", "eager"):
        with pytest.raises(UserError, match="it has no softcap"):
            call.select(inputs, backend)
        return
    scores = (2.0 * torch.tanh(0.5 * q @ k.mT / 2.0)).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    selected, module = call.select(inputs, backend)
    torch.testing.assert_close(module.attend(selected, 0), scores.softmax(-1) @ v, rtol=0, atol=1e-12)
