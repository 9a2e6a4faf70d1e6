"""Position schemes and `attend`, against transformers' own functions and attention written out row by row."""

import math

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5Attention

from lm_experiments_tools.attention import AttentionSpec, attend
from lm_experiments_tools.attention.kernels.bias import AlibiBias, T5Bias, dense_bias
from lm_experiments_tools.attention.kernels.call import backend_of, limit_float16
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from lm_experiments_tools.attention.positions import (
    AlibiPosition,
    RelativeBiasPosition,
    RotaryPosition,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_full_rotary_is_llamas():
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    q, k = draw(2, 2, 9, 16), draw(2, 2, 9, 16, seed=1)
    position_ids = torch.arange(4, 13)[None]
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, position_ids)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    turned = RotaryPosition(16, base=500.0).rotate(q, k, offset=4)
    for ours, theirs in zip(turned, expected, strict=True):  # theirs has angles in float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_partial_rotary_is_gpt_neoxs():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope)
    q, k = draw(1, 2, 7, 32), draw(1, 2, 7, 32, seed=1)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, torch.arange(7)[None])
    expected = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip(RotaryPosition(32, rotary_dim=8).rotate(q, k), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_relative_bias_is_transformers(is_decoder):
    config = T5Config(num_heads=4, relative_attention_num_buckets=16, relative_attention_max_distance=40)
    config.is_decoder = is_decoder
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativeBiasPosition(16, 40, num_heads=4, bidirectional=not is_decoder)
    ours.load_state_dict(theirs.relative_attention_bias.state_dict())
    whole = ours.bias(60, 60)
    assert isinstance(whole, T5Bias)
    assert torch.equal(dense_bias(whole, 60, 60), theirs.compute_bias(60, 60))
    for offset in (57, torch.tensor(57)):
        step = ours.bias(3, 60, offset)
        assert torch.equal(step, theirs.compute_bias(3, 60, past_seen_tokens=57))
    assert torch.equal(ours.bias(5, 60), theirs.compute_bias(5, 60))


def test_alibi_has_blooms_slopes_on_both_sides():
    for num_heads in (4, 6):
        whole = AlibiPosition(num_heads).bias(8, 8)
        assert isinstance(whole, AlibiBias)
        bloom = build_alibi_tensor(torch.ones(1, 8), num_heads, torch.float32)  # slope * key position
        row = dense_bias(whole, 8, 8)[0, :, 7]
        torch.testing.assert_close(row, bloom[:, 0] - bloom[:, 0, 7:])
        torch.testing.assert_close(dense_bias(whole, 8, 8).mT, dense_bias(whole, 8, 8))
        torch.testing.assert_close(AlibiPosition(num_heads).bias(2, 8, 6), dense_bias(whole, 8, 8)[:, :, 6:])


def by_hand(q, k, v, bias, allowed, scale):
    """Attention row by row, over the keys that are there."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        keys = allowed[b, h, i].nonzero().flatten().tolist()
        logits = [float(q[b, h, i] @ k[b, h, j]) * scale + float(bias[0, h, i, j]) for j in keys]
        total = sum(math.exp(x) for x in logits)
        for j, x in zip(keys, logits, strict=True):
            out[b, h, i] += math.exp(x) / total * v[b, h, j]
    return out


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "block_sparse"])
@pytest.mark.parametrize("form", ["padding", "matrix"])
def test_attention_is_that_of_its_definition_and_empty_rows_are_zero(implementation, form):
    q, k, v = (draw(2, 2, 6, 4, seed=seed) for seed in range(3))
    q.requires_grad_()
    bias = T5Bias(draw(4, 2, seed=3).requires_grad_(), num_buckets=4, max_distance=3)
    padding = torch.tensor([[True] * 4 + [False] * 2, [False] * 6])
    allowed = padding[:, None, None, :] & torch.ones(6, 6, dtype=torch.bool).tril()
    masks = {"key_padding_mask": padding, "causal": True} if form == "padding" else {"mask": allowed}
    out, weights = attend(q, k, v, AttentionSpec(bias=bias, scale=1.0, **masks), backend_of(implementation))
    expected = by_hand(q.detach(), k, v, dense_bias(bias, 6, 6).detach(), allowed.expand(2, 2, 6, 6), 1.0)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert not out[1].any() and weights is None
    out.square().sum().backward()
    assert q.grad.isfinite().all() and bias.weight.grad.isfinite().all() and bias.weight.grad.any()


def test_weights_and_masks_of_a_layout_are_those_of_the_sparse_output():
    q, k, v = (draw(1, 2, 64, 4, seed=seed) for seed in range(3))
    layout = BigBirdSparsityConfig(2, block=8, different_layout_per_head=True, num_sliding_window_blocks=1)
    spec = AttentionSpec(layout=layout)
    sparse, _ = attend(q, k, v, spec)
    out, weights = attend(q, k, v, spec, output_attentions=True)
    torch.testing.assert_close(out, sparse, rtol=1e-10, atol=1e-10)
    assert torch.equal(weights[0] > 0, layout.make_layout(64).repeat_interleave(8, 1).repeat_interleave(8, 2) > 0)
    whole = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    masked, _ = attend(q, k, v, spec._replace(mask=whole))
    torch.testing.assert_close(masked, sparse, rtol=1e-10, atol=1e-10)
    last, _ = attend(q[:, :, -3:], k, v, spec._replace(mask=whole[:, :, -3:]))
    torch.testing.assert_close(last, sparse[:, :, -3:], rtol=1e-10, atol=1e-10)


def test_returned_weights_are_those_of_the_output_and_have_its_gradient():
    q, k, v = torch.randn(3, 2, 2, 5, 4, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 2], mask[1, ..., 3:] = False, False
    output, weights = attend(q, k, v, AttentionSpec(mask=mask), "eager", output_attentions=True)
    upstream = torch.randn_like(output)
    (got,) = torch.autograd.grad(output, weights, upstream, retain_graph=True)
    torch.testing.assert_close(got, upstream @ v.transpose(-1, -2))
    torch.testing.assert_close(output, weights @ v)
    assert not weights[0, :, 2].any()


def test_scores_beyond_float16_do_not_become_nan():
    q = torch.full((1, 1, 3, 64), 200.0, dtype=torch.float16)
    k = torch.stack([torch.full((64,), 200.0), torch.full((64,), -200.0), torch.full((64,), 100.0)])[None, None].half()
    assert (q @ k.mT).isinf().any()
    out, _ = attend(q, k, k, AttentionSpec(scale=1.0), "eager")
    assert out.isfinite().all()
    assert limit_float16(torch.tensor(torch.inf)).isinf()
