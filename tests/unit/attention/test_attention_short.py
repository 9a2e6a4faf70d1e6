"""Dense calls on a CPU: rows without any key, and what inference caches."""

from __future__ import annotations

import torch

from lm_experiments_tools.attention import T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels import sdpa
from lm_experiments_tools.attention.kernels.call import AttentionInputs, AttentionSpec
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from tests.helpers.attention_cases import tensors


def test_rows_opened_for_gpus_are_what_the_cpu_gives():
    q, k, v = tensors(2, 2, 20, 8)
    (bias,) = tensors(1, 2, 20, 20, count=1)
    with torch.no_grad():
        bias[:, :, 2] = bias[:, :, :, 4] = -torch.inf
    mask = torch.arange(20)[None] < torch.tensor([[12], [0]])
    leaves = [q, k, v, bias]
    results = []
    for call in (
        lambda: sdpa.masked(q, k, v, bias, mask[:, None, None], 0.3, 0.0),
        lambda: sdpa.attend(AttentionInputs(q, k, v, AttentionSpec(bias=bias, key_padding_mask=mask, scale=0.3))),
    ):
        output = call()
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_what_inference_keeps_serves_training():
    q, k, v = tensors(1, 2, 24, 8)
    (weight,) = tensors(32, 2, count=1)
    layout = BigBirdSparsityConfig(2, block=4)
    with torch.inference_mode():
        block_sparse_attention(q, k, v, layout, T5Bias(weight), causal=True)
    output = block_sparse_attention(q, k, v, layout, T5Bias(weight), causal=True)
    assert all(x.abs().max() > 0 for x in torch.autograd.grad(output.square().sum(), [q, k, v, weight]))
