"""Variants of modeling_t5 do not keep, or make, what they do not need; adapters reach every matrix."""

import pytest
import torch

from lm_experiments_tools.attention import AttentionSpec
from modeling_t5 import T5Config, T5EncoderModel

SIZES = {
    "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
CDQ = {"encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 2}


def make(**settings) -> T5EncoderModel:
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(**SIZES, **settings))


def layers(model: T5EncoderModel) -> list:
    return [block.layer[0].SelfAttention for block in model.encoder.block]


def test_queries_of_cdq_need_no_wide_tensor():
    """Nothing kept is [B, heads, L, D]; test_modeling_t5.py compares values."""
    layer, kept = layers(make(**CDQ))[0], []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda x: x):
        layer.context_queries(torch.randn(2, 7, 16), AttentionSpec())
    wide = 2 * CDQ["num_cdq_heads"] * 7 * 16
    assert kept and not any(shape[-1:] == (16,) and shape.numel() == wide for shape in kept)


def test_adapters_of_every_matrix_of_cdq_are_trained_and_merged():
    peft = pytest.importorskip("peft")
    names = ["q", "k", "v", "o", "cd_q", "cd_w", "T", "W_t"]
    adapters = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(make(**CDQ), adapters).eval()
    ids = torch.arange(1, 13).view(2, 6)
    states = model(input_ids=ids).last_hidden_state
    states.pow(3).sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(names) * SIZES["num_layers"]
    assert [name for name, gradient in trained.items() if gradient is None or not gradient.any()] == []
    merged = model.merge_and_unload()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(merged, states, rtol=1e-4, atol=1e-5)
