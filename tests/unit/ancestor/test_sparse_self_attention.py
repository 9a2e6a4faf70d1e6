"""SparseSelfAttention, called as DeepSpeed's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lm_experiments_tools.ancestor.sparse_self_attention import SparseSelfAttention
from lm_experiments_tools.attention import SparsityConfig, T5Bias
from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from lm_experiments_tools.errors import UserError


def expected_attention(q: Tensor, k: Tensor, v: Tensor, config: SparsityConfig, length: int, added: Tensor) -> Tensor:
    """Softmax over the tokens of the layout's corner, written out."""
    blocks = -(-length // config.block)
    tokens = config.make_layout(64)[:, :blocks, :blocks].bool()
    tokens = tokens.repeat_interleave(config.block, 1).repeat_interleave(config.block, 2)[:, :length, :length]
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + added
    return scores.masked_fill(~tokens, float("-inf")).softmax(-1) @ v


class TestSparseSelfAttention:
    CONFIG = BigBirdSparsityConfig(2, block=8, different_layout_per_head=True, num_global_blocks=0)

    def inputs(self, length: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(3, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(3)]

    @pytest.mark.parametrize("length", [64, 40, 29])
    @pytest.mark.parametrize("modes", [("add", "mul"), ("mul", "add")])
    def test_masks_and_rpe_are_deepspeeds(self, length, modes):
        """score = q k * d^-0.5 + rpe + masks; "mul" leaves out where 0, "add" adds; padding 4-D or 2-D."""
        q, k, v = self.inputs(length)
        rpe = torch.randn(1, 2, length, length, dtype=torch.float64)
        keep = torch.ones(3, length, dtype=torch.float64)
        keep[1, length - 3 :] = 0
        order = torch.ones(length, length, dtype=torch.float64).tril(4)
        additive = torch.randn(length, length, dtype=torch.float64)
        padding = keep if modes[0] == "mul" else (1 - keep)[:, None, None] * -10000.0
        module = SparseSelfAttention(self.CONFIG, *modes, max_seq_length=64)
        output = module(q, k.transpose(2, 3), v, rpe, padding, order if modes[1] == "mul" else additive)
        added = rpe + torch.zeros_like(keep).masked_fill(keep == 0, float("-inf"))[:, None, None]
        added = added + (additive if modes[1] == "add" else torch.zeros_like(order).masked_fill(order == 0, -1e300))
        torch.testing.assert_close(output, expected_attention(q, k, v, self.CONFIG, length, added), rtol=0, atol=1e-12)

    def test_an_additive_padding_mask_may_hold_any_numbers(self):
        q, k, v = self.inputs(64)
        padding = torch.randn(3, 64, dtype=torch.float64)
        output = SparseSelfAttention(self.CONFIG, max_seq_length=64)(q, k, v, key_padding_mask=padding)
        expected = expected_attention(q, k, v, self.CONFIG, 64, padding[:, None, None])
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("mode", ["mul", "add"])
    def test_a_query_whose_keys_are_all_masked_gives_zeros(self, mode):
        """Left padding under a causal mask: a padded query has no key, least of all a later one."""
        q, k, v = (x.requires_grad_() for x in self.inputs(64))
        order = torch.ones(64, 64).tril()
        order[40] = 0
        keep = torch.ones(3, 64)
        keep[1, :20] = 0
        added = -10000.0 if mode == "add" else 0.0  # of BERT code
        masks = (keep, order) if mode == "mul" else ((1 - keep) * added, (1 - order) * added)
        rpe = torch.randn(1, 2, 64, 64, dtype=torch.float64)
        output = SparseSelfAttention(self.CONFIG, mode, mode, max_seq_length=64)(q, k, v, rpe, *masks)
        tokens = self.CONFIG.make_layout(64).bool().repeat_interleave(8, 1).repeat_interleave(8, 2)
        allowed = tokens & order.bool() & keep.bool()[:, None, None, :]
        weights = (q @ k.transpose(2, 3) / 2 + rpe).exp() * allowed
        expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v
        assert (output[1, :, :20] == 0).all() and (output[:, :, 40] == 0).all()
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        for got, wanted in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (output, expected)), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)

    def test_a_module_built_in_inference_mode_is_as_good_as_any(self):
        with torch.inference_mode():
            module = SparseSelfAttention(self.CONFIG, max_seq_length=64)
            q, k, v = self.inputs(64)
            inside = module(q, k, v)
        plain = SparseSelfAttention(self.CONFIG, max_seq_length=64)
        q, k, v = (x.requires_grad_() for x in self.inputs(64))
        assert torch.equal(module(q, k, v), plain(q, k, v)) and torch.equal(inside, plain(q, k, v))
        module(q, k, v).sum().backward()
        module.load_state_dict(plain.state_dict())

    @pytest.mark.parametrize("as_matrix", [True, False])
    def test_a_relative_bias_trains(self, as_matrix):
        """Under DeepSpeed it got no gradient at all and stayed as it was drawn."""
        q, k, v = self.inputs(64)
        weight = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
        bias = T5Bias(weight, num_buckets=8, max_distance=32)
        module = SparseSelfAttention(self.CONFIG, max_seq_length=64)
        module(q, k, v, rpe=dense_bias(bias, 64, 64) if as_matrix else bias).square().sum().backward()
        got, weight.grad = weight.grad, None
        expected_attention(q, k, v, self.CONFIG, 64, dense_bias(bias, 64, 64)).square().sum().backward()
        assert got.abs().max() > 1e-3
        torch.testing.assert_close(got, weight.grad, rtol=0, atol=1e-11)

    def test_instances_of_one_length_have_layouts_of_their_own(self):
        """DeepSpeed kept one per length for all modules of a process."""
        q, k, v = self.inputs(64)
        other = BigBirdSparsityConfig(2, block=8, different_layout_per_head=True, num_global_blocks=0, layer_idx=1)
        first, second = (SparseSelfAttention(config, max_seq_length=64)(q, k, v) for config in (self.CONFIG, other))
        assert not torch.equal(first, second)
        torch.testing.assert_close(second, expected_attention(q, k, v, other, 64, torch.zeros(())))

    def test_a_checkpoint_brings_its_layout(self):
        """DeepSpeed's were drawn from an unseeded generator: the buffer is all that is left of them."""
        q, k, v = self.inputs(64)
        old = BigBirdSparsityConfig(2, block=8, different_layout_per_head=True, num_global_blocks=0, seed=99)
        trained, fresh = (
            SparseSelfAttention(old, max_seq_length=64),
            SparseSelfAttention(self.CONFIG, max_seq_length=64),
        )
        assert not torch.equal(fresh(q, k, v), trained(q, k, v))
        assert list(trained.state_dict()) == ["master_layout"]
        fresh.load_state_dict(trained.state_dict())
        assert torch.equal(fresh(q, k, v), trained(q, k, v))

    @pytest.mark.parametrize(
        ("modes", "arguments", "message"),
        [
            (("div", "mul"), {}, "key_padding_mask_mode='div' is neither 'add' nor 'mul'"),
            (("add", "mul"), {"key_padding_mask": torch.ones(3, 64, dtype=torch.bool)}, "pass key_padding_mask_mode"),
            (("mul", "mul"), {"key_padding_mask": torch.ones(3, 63)}, r"shape \[3, 63\], not \[3, 64\]"),
            (("mul", "mul"), {"rpe": torch.ones(64, 64)}, r"bias is float32 \[64, 64\]"),
            (("mul", "mul"), {"length": 72}, "72 queries and 72 keys need"),
        ],
    )
    def test_mistakes_are_sentences(self, modes, arguments, message):
        arguments = dict(arguments)
        q, k, v = self.inputs(arguments.pop("length", 64))
        with pytest.raises(UserError, match=message):
            SparseSelfAttention(self.CONFIG, *modes, max_seq_length=64)(q, k, **{"value": v, **arguments})
