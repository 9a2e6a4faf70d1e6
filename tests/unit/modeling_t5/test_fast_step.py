"""`use_fast_step`: another way to the same gradients, which leaves alone whatever it does not know."""

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounter

import modeling_t5
from lm_experiments_tools.modules.fast_step import is_plain
from lm_experiments_tools.recipes.t5 import without_full_masks
from tests.helpers.t5_pair import SIZES, T5_1_1, batch

CDQ = {"encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 2}
VARIANTS = {
    "1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "1.1": {},
    "bias per layer": {"relative_attention_bias_per_layer": True},
    "rotary": {"position_embedding_type": "rotary"},
    "alibi": {"position_embedding_type": "alibi"},
    "no positions": {"position_embedding_type": "none"},
    "cdQ": CDQ,
    "memory": {"num_memory_tokens": 3},
    "sparse": {"sparse_config_cls": "BSLongformer", "sparse_attention": {"block": 8}},
    "losses": {"z_loss": 1e-2, "label_smoothing": 0.1, "cross_entropy_chunk_size": 5},
}


def make(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    config = modeling_t5.T5Config(**{**SIZES, **T5_1_1, **settings})
    return modeling_t5.T5ForConditionalGeneration(config).to(dtype).train()


def full(length=30, targets=24):
    """A batch without padding, as pre-training has them."""
    inputs = batch()
    return {"input_ids": inputs["input_ids"][:, :length], "labels": inputs["labels"][:, :targets]}


def gradients(model, inputs, **options):
    model.zero_grad()
    loss = model(**inputs, **options).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found, wanted, relative):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= relative * gradient.abs().max(), name


@pytest.mark.parametrize("inputs", [batch(), full()], ids=["padding", "no padding"])
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_has_its_own_gradients(settings, inputs):
    model = make(**settings)
    loss, wanted = gradients(model, inputs, use_cache=False)
    model.use_fast_step()
    again, found = gradients(model, inputs, return_logits=False, use_cache=False)
    torch.testing.assert_close(again, loss, rtol=1e-10, atol=0)
    assert_close(found, wanted, 1e-9)
    logits = model.eval()(**inputs).logits
    model.use_fast_step(False)
    torch.testing.assert_close(logits, model(**inputs).logits, rtol=1e-10, atol=1e-10)


def test_gradients_in_bfloat16_point_where_those_of_float32_do():
    """Of every tensor, the position bias included, although the sum that layers add to is in bfloat16."""
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 6, "num_decoder_layers": 6, "vocab_size": 100}
    model, kept = make(torch.float32, **sizes), []
    wanted = gradients(model, full(), use_cache=False)[1]
    model.use_fast_step()
    for block in (model.encoder.block[3], model.decoder.block[3]):
        block.register_forward_pre_hook(lambda block, args: kept.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**full(), use_cache=False, return_logits=False).loss
    model.zero_grad()
    loss.backward()
    assert kept == [torch.bfloat16] * 2
    for name, parameter in model.named_parameters():
        cosine = nn.functional.cosine_similarity(parameter.grad.flatten(), wanted[name].flatten(), dim=0)
        assert parameter.grad.dtype == torch.float32 and cosine >= 0.999, (name, cosine)


def test_it_is_off_unless_asked_for_and_can_be_turned_off_again():
    model, switched = make(torch.float32), make(torch.float32)
    switched.use_fast_step()
    fast = gradients(switched, batch(), use_cache=False)
    switched.use_fast_step(False)
    plain, again = gradients(model, batch(), use_cache=False), gradients(switched, batch(), use_cache=False)
    assert torch.equal(plain[0], again[0]) and all(torch.equal(plain[1][n], g) for n, g in again[1].items())
    assert not all(torch.equal(plain[1][n], g) for n, g in fast[1].items())
    assert model.config.to_dict() == switched.config.to_dict() and list(model.state_dict()) == list(
        switched.state_dict()
    )


def test_logits_are_left_out_only_where_the_caller_says_so():
    model = make()
    model.use_fast_step()
    wanted = model(**full())
    assert wanted.logits.shape == (3, 24, 100)
    got = model(**full(), return_logits=False)
    assert got.logits is None
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-12, atol=0)


def test_adapted_hooked_and_replaced_layers_are_called():
    """An adapter's gradients are those of the plain step; a hook sees what its layer is given."""
    peft = pytest.importorskip("peft")
    names = ["q", "v", "wi_0", "shared"]
    adapters = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(make(), adapters)
    wanted = gradients(model, batch(), use_cache=False)[1]
    model.use_fast_step()
    assert_close(gradients(model, batch(), use_cache=False, return_logits=False)[1], wanted, 1e-9)
    assert any("lora_A" in name for name in wanted)
    model, seen = make(), []
    model.use_fast_step()
    block = model.encoder.block[1].layer
    block[0].SelfAttention.k.register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    block[1].DenseReluDense.wi_1.forward = lambda x: seen.append(x.shape) or torch.zeros(*x.shape[:2], 37).double()
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None):
        assert not is_plain(model.lm_head, nn.Linear)
    gradients(model, full(), use_cache=False)
    assert seen == [(3, 30, 32), (3, 30, 32)]


@pytest.mark.slow
def test_each_kind_of_block_is_one_graph_and_two_for_any_lengths():
    """No graph breaks, and the first layer, which owns the position bias, is compiled as all others."""
    torch.compiler.reset()
    all_lengths = (30, 24), (28, 20), (25, 13)
    model, counter = make(num_layers=3, num_decoder_layers=3), CompileCounter()
    wanted = [gradients(model, full(*lengths), use_cache=False) for lengths in all_lengths]
    model.use_fast_step()
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            block.compile(backend=counter, fullgraph=True)
    graphs = []
    for lengths, (loss, gradient) in zip(all_lengths, wanted, strict=True):
        again, found = gradients(model, full(*lengths), use_cache=False, return_logits=False)
        torch.testing.assert_close(again, loss)
        assert_close(found, gradient, 1e-9)
        graphs.append(counter.frame_count)
    assert graphs == [2, 4, 4]


def test_masks_of_ones_are_left_out_for_the_fast_step_alone():
    model = make()
    inputs = {**full(), "attention_mask": torch.ones(3, 30, dtype=torch.long)}
    assert without_full_masks(model) is None
    model.use_fast_step()
    assert without_full_masks(model)(inputs).keys() == {"input_ids", "labels"}
    assert without_full_masks(model)(batch()).keys() == {"input_ids", "labels", "attention_mask"}
    assert without_full_masks(transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES))) is None
