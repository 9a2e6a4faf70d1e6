"""Traces that a call leaves, and what may change between two calls: seeds, masks, layouts, traces, devices."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lm_experiments_tools.attention import T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels import layout_cache
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from tests.helpers.attention_cases import tensors
from tests.helpers.attention_reference import attention_probabilities

# the last takes "blocks", the others SDPA
LAYOUTS = {
    "dense": (None, 20),
    "sparse": (BigBirdSparsityConfig(2, block=4), 24),
    "long": (BigBirdSparsityConfig(2, block=16), 320),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_of_a_first_call_is_that_of_all_later_ones(name):
    layout, length = LAYOUTS[name]
    q, k, v = tensors(2, 2, length, 8)
    outputs = []
    for _ in range(3):
        torch.manual_seed(7)
        outputs.append(block_sparse_attention(q, k, v, layout, dropout_p=0.4))
        outputs.append(torch.rand(3))  # what the rest of the model draws
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[2], outputs[4])
    assert torch.equal(outputs[1], outputs[3]) and torch.equal(outputs[3], outputs[5])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_recomputed_dropout_of_a_first_call_is_the_same(name, reentrant):
    """The output is linear in v, so that its sum is <gradient of v, v> if both passes drop the same weights."""
    layout, length = LAYOUTS[name]
    q, k, v = tensors(2, 2, length, 8)
    output = checkpoint(lambda *x: block_sparse_attention(*x, layout, dropout_p=0.4), q, k, v, use_reentrant=reentrant)
    output.sum().backward()
    torch.testing.assert_close((v.grad * v).sum(), output.sum(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", ["blocks", "sdpa"])
@pytest.mark.parametrize("segmented", [False, True])
def test_masks_may_be_written_to_before_the_backward_pass(backend, segmented):
    """As where batches are read into one buffer."""
    q, k, v = tensors(2, 2, 64, 8)
    mask = torch.arange(64)[None] < torch.tensor([[64], [30]])
    segments = torch.arange(64).div(20, rounding_mode="floor").expand(2, -1).clone()
    grads = []
    for overwritten in (False, True):
        arguments = {"segment_ids": segments.clone()} if segmented else {"key_padding_mask": mask.clone()}
        output = block_sparse_attention(q, k, v, backend=backend, **arguments)
        if overwritten:
            for x in arguments.values():
                x.zero_()
        grads.append(torch.autograd.grad(output.square().sum(), [q, k, v]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_trace_without_numbers_leaves_nothing_behind():
    with FakeTensorMode():
        assert block_sparse_attention(*(torch.randn(1, 3, 700, 8) for _ in range(3))).shape == (1, 3, 700, 8)
    q = torch.randn(1, 3, 700, 8)
    assert block_sparse_attention(q, q, q).isfinite().all()


def test_one_mask_serves_all_lengths_that_fill_the_same_blocks():
    layout = BigBirdSparsityConfig(2, block=16)
    for length in range(97, 113):
        q, k, v = tensors(1, 2, length, 8)
        dense = attention_probabilities(q, k, layout) @ v
        torch.testing.assert_close(block_sparse_attention(q, k, v, layout), dense, rtol=0, atol=1e-10)
    resolved = layout_cache.resolve_layout(layout, 2, 112, 112)
    assert len([key for key in layout_cache._cache[id(resolved)] if key[0] == "mask"]) == 1


def test_the_default_device_is_that_of_new_tensors_alone():
    q = torch.randn(1, 2, 300, 8)
    with torch.device("meta"):
        assert block_sparse_attention(q, q, q, bias=T5Bias(torch.zeros(32, 2, device="cpu"))).device.type == "cpu"
        assert block_sparse_attention(q, q, q, dropout_p=0.1, backend="blocks").device.type == "cpu"
