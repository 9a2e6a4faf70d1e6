"""Variants of modeling_t5 do not keep, or make, what they do not need; adapters reach every matrix."""

import pytest
import torch
import torch.nn.functional as F

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


def test_queries_of_cdq_equal_those_of_the_split_matrix_and_need_no_wide_tensor():
    """cd_q (W_p P + W_x x), where cd_w = [W_p, W_x], values and gradients; nothing kept is [B, heads, L, D]."""
    layer = layers(make(**CDQ).double())[0]
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    real = torch.tensor([[True] * 4 + [False] * 3, [True] * 7])
    scores = layer.T(F.relu(layer.W_t(x))).transpose(1, 2).masked_fill(~real[:, None], -torch.inf)
    for_pooled, for_token = layer.cd_w.weight.chunk(2, dim=1)
    mixed = F.linear(scores.softmax(-1) @ x, for_pooled)[:, :, None] + F.linear(x, for_token)[:, None]
    wanted = layer.cd_q(mixed)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda x: x):
        got = layer.context_queries(x, AttentionSpec(key_padding_mask=real))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert kept and not any(shape[-1:] == (16,) and shape.numel() == mixed.numel() for shape in kept)
    parameters = [layer.cd_w.weight, layer.cd_q.weight, layer.T.weight, layer.W_t.weight]
    for ours, theirs in zip(*(torch.autograd.grad(y.pow(2).sum(), parameters) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


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


@pytest.mark.parametrize(("name", "distinct"), [("BSLongformer", 1), ("BigBird", 3)])
def test_layers_without_random_blocks_share_one_layout(name, distinct):
    """Kernels keep their lists with the object: those of one layout are made once."""
    model = make(sparse_config_cls=name, sparse_attention={"block": 4})
    assert len({id(layer.layout) for layer in layers(model)}) == distinct
    other = make(sparse_config_cls=name, sparse_attention={"block": 8})
    assert not {id(layer.layout) for layer in layers(model)} & {id(layer.layout) for layer in layers(other)}
