"""The variants of modeling_t5: each is what its definition says, is the base model when off, trains, and is kept."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassFieldValidationError

from lm_experiments_tools.attention import AttentionSpec
from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.kernels.call import force_backend
from lm_experiments_tools.attention.layouts import get_sparsity_config
from modeling_t5 import (
    T5Config,
    T5EncoderForSequenceClassification,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

SIZES = {
    "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
CDQ = {"encoder_self_attention_layer": "modeling_t5:T5CDQAttention"}
BIGBIRD = {
    "sparse_config_cls": "deepspeed.ops.sparse_attention:BigBirdSparsityConfig",
    "sparse_attention": {"block": 4, "num_sliding_window_blocks": 1, "different_layout_per_head": True},
}
VARIANTS = {
    "base": {},
    "gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bias per layer": {"relative_attention_bias_per_layer": True},
    "rotary": {"position_embedding_type": "rotary"},
    "partial rotary": {"position_embedding_type": "rotary", "rotary_dim": 2, "rotary_base": 500},
    "alibi": {"position_embedding_type": "alibi"},
    "no positions": {"position_embedding_type": "none"},
    "cdQ": {**CDQ, "num_cdq_heads": 2},
    "only cdQ": {**CDQ, "num_cdq_heads": 4, "position_embedding_type": "rotary"},
    "memory": {"num_memory_tokens": 3},
    "sparse": BIGBIRD,
    "sparse with alibi and memory": {**BIGBIRD, "position_embedding_type": "alibi", "num_memory_tokens": 3},
    "losses": {"z_loss": 1e-2, "label_smoothing": 0.1, "cross_entropy_chunk_size": 5},
}
variants = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture(autouse=True)
def sparse_is_sparse(request):
    """Inputs as short as here take SDPA by themselves, which is not what serves long ones."""
    with nullcontext() if request.node.get_closest_marker("gpu") else force_backend("blocks"):
        yield


def make(cls=T5ForConditionalGeneration, seed=0, **settings):
    torch.manual_seed(seed)
    return cls(T5Config(**{**SIZES, **settings})).eval()


def batch(length=21):
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(2, 50, (2, length), generator=generator)
    mask = torch.ones_like(input_ids)
    mask[0, length * 2 // 3 :] = 0
    labels = torch.randint(2, 50, (2, 9), generator=generator)
    labels[1, 5:] = -100
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_initial_values_of_what_transformers_has_not():
    """Or draws otherwise: N(0, 1 / D), and N(0, 1 / elements) for cdQ's."""
    model = make(**CDQ, num_cdq_heads=2, d_model=64, num_memory_tokens=8, tie_word_embeddings=False)
    attention = model.encoder.block[0].layer[0].SelfAttention
    spreads = {model.lm_head.weight: 64**-0.5, model.encoder.memory_tokens: 1, attention.cd_q.weight: (64 * 4) ** -0.5}
    for weight in (attention.cd_w.weight, attention.T.weight, attention.W_t.weight):
        spreads[weight] = weight.numel() ** -0.5
    for weight, spread in spreads.items():
        assert weight.std().item() == pytest.approx(spread, rel=0.25)


@variants
def test_variant_trains_all_of_its_parameters_and_survives(settings, tmp_path):
    """Gradients, checkpointed ones, bfloat16 autocast, save and load."""
    model = make(**settings)
    loss, wanted = gradients(model, **batch())
    for name, gradient in wanted.items():
        assert gradient.isfinite().all() and gradient.any(), name
    model.train()  # dropout is 0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, recomputed = gradients(model, **batch())
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(recomputed, wanted)
    model.gradient_checkpointing_disable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, _ = gradients(model, **batch())
    torch.testing.assert_close(rough, loss, rtol=0.03, atol=0.03)
    model.eval().save_pretrained(tmp_path)
    loaded, report = T5ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
    for key in settings:
        assert getattr(loaded.config, key) == getattr(model.config, key)
    assert torch.equal(loaded(**batch()).loss, model(**batch()).loss)


@pytest.mark.parametrize("name", ["bias per layer", "rotary", "alibi", "no positions", "only cdQ", "memory", "sparse"])
def test_generation_is_the_same_with_and_without_cache(name):
    model = make(**VARIANTS[name])
    inputs = batch()
    del inputs["labels"]
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "num_beams": 2}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False))


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 3), (3, 1)])
def test_generation_caches_as_many_layers_as_the_decoder_has(encoder, decoder):
    model = make(num_layers=encoder, num_decoder_layers=decoder)
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    written = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, return_dict_in_generate=True)
    assert len(written.past_key_values.self_attention_cache.layers) == decoder
    again = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, use_cache=False)
    assert torch.equal(written.sequences, again) and model.config.num_layers == encoder


OFF = {
    "no cdQ heads": {**CDQ, "num_cdq_heads": 0},
    "spelling of the ancestor": {
        kind: "modeling_t5.modeling_t5:T5Attention"
        for kind in ("encoder_self_attention_layer", "decoder_self_attention_layer", "decoder_cross_attention_layer")
    },
    "float32 residual in float32": {"fp32_residual": True},
}


@pytest.mark.parametrize("settings", OFF.values(), ids=OFF)
def test_variant_that_is_off_is_the_base_model(settings):
    base, variant = make(), make(**settings)
    assert variant.state_dict().keys() == base.state_dict().keys()
    variant.load_state_dict(base.state_dict())
    for wanted, got in zip(gradients(base, **batch()), gradients(variant, **batch()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_layout_is_a_mask_on_the_encoder_alone():
    """The same numbers as full attention under the layout's mask, the bias and padding included; each layer's own."""
    layout = {"sparse_config_cls": "BSLongformer", "sparse_attention": {"block": 4}}
    base, variant = make().double(), make(**layout).double()
    variant.load_state_dict(base.state_dict())
    inputs = batch(24)
    blocks = get_sparsity_config("BSLongformer", 4, block=4).make_layout(24)
    mask = blocks.repeat_interleave(4, 1).repeat_interleave(4, 2) * inputs["attention_mask"][:, None, None]
    states = base.encoder(inputs["input_ids"], attention_mask=mask).last_hidden_state
    wanted = base(encoder_outputs=(states,), attention_mask=inputs["attention_mask"], labels=inputs["labels"])
    got = variant(**inputs)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(got.encoder_last_hidden_state[seen], states[seen], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-10, atol=1e-10)
    random = make(T5EncoderModel, **BIGBIRD).encoder
    first, second = (block.layer[0].SelfAttention.layout.make_layout(64) for block in random.block)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("num_cdq_heads", [2, 4])
def test_cdq_is_its_definition(num_cdq_heads):
    """P = softmax(T relu(W_t x)) x; q = cd_q cd_w [P; x]: with concatenation, as t5-experiments wrote it."""
    model = make(T5EncoderModel, **CDQ, num_cdq_heads=num_cdq_heads).double()
    layer = model.encoder.block[0].layer[0].SelfAttention
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    real = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    scores = layer.T(F.relu(layer.W_t(x))).transpose(1, 2).masked_fill(~real[:, None], -torch.inf)
    pooled = scores.softmax(-1) @ x
    both = torch.cat([pooled[:, :, None].expand(-1, -1, 6, -1), x[:, None].expand(-1, num_cdq_heads, -1, -1)], dim=-1)
    queries = [layer.cd_q(layer.cd_w(both))]
    if num_cdq_heads == 2:
        queries.insert(0, layer.q(x).view(2, 6, 2, 4).transpose(1, 2))
    k, v = (projected(x).view(2, 6, num_cdq_heads, 4).transpose(1, 2) for projected in (layer.k, layer.v))
    bias = dense_bias(layer.relative_attention_bias.bias(6, 6), 6, 6)
    mask = bias.masked_fill(~real[:, None, None], -torch.inf)
    heads = [F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0) for q in queries]
    wanted = layer.o(torch.cat(heads, dim=1).transpose(1, 2).flatten(2))
    for implementation in ("eager", "sdpa", "block_sparse"):
        model.set_attn_implementation(implementation)
        got = layer(x, AttentionSpec(key_padding_mask=real, scale=1.0))[0]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_memory_tokens_are_vectors_before_the_input():
    base, variant = make(), make(num_memory_tokens=3)
    variant.load_state_dict(base.state_dict(), strict=False)
    inputs = batch()
    memory = variant.encoder.memory_tokens.expand(2, -1, -1)
    got = variant(**inputs)
    wanted = base(
        inputs_embeds=torch.cat([memory, base.shared(inputs["input_ids"])], dim=1),
        attention_mask=F.pad(inputs["attention_mask"], (3, 0), value=1),
        labels=inputs["labels"],
    )
    torch.testing.assert_close(got.logits, wanted.logits)
    assert got.encoder_last_hidden_state.shape == (2, 24, 16)
    without_mask = variant(input_ids=inputs["input_ids"], labels=inputs["labels"])
    ones = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    torch.testing.assert_close(without_mask.logits, variant(**ones).logits)


@pytest.mark.parametrize("settings", [{}, {"num_memory_tokens": 3}], ids=["base", "memory"])
def test_encoder_classifies_the_mean_of_what_is_no_padding(settings, tmp_path):
    """From a checkpoint of the whole model, which lacks the classifier alone."""
    whole = make(**settings)
    whole.save_pretrained(tmp_path)
    model, report = T5EncoderForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True
    )
    assert report["missing_keys"] == {"classifier.weight", "classifier.bias"} and not report["unexpected_keys"]
    assert 0 < model.classifier.weight.std() < 2 * 16**-0.5 and not model.classifier.bias.any()
    model.eval()
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    states = whole.encoder(**inputs).last_hidden_state[:, settings.get("num_memory_tokens", 0) :]
    means = torch.stack([states[0, :14].mean(0), states[1].mean(0)])
    torch.testing.assert_close(model(**inputs).logits, model.classifier(means))
    inputs["attention_mask"][1] = 0
    torch.testing.assert_close(model(**inputs).logits[1], model.classifier.bias)
    torch.testing.assert_close(model(inputs["input_ids"][1:]).logits[0], model.classifier(means[1]))
    with pytest.raises(ValueError, match=r"it must be \[batch, length\]"):
        model(inputs["input_ids"], torch.ones(2, 1, 21, 21))


@pytest.mark.parametrize("cls", [T5EncoderModel, T5EncoderForSequenceClassification])
def test_encoders_leave_the_given_configuration_as_it_is(cls):
    config = T5Config(**SIZES)
    before = config.to_dict()
    model = cls(config)
    assert config.to_dict() == before and config.is_encoder_decoder
    assert not model.config.is_encoder_decoder and not model.config.use_cache


BAD = {
    "position_embedding_type='absolute' is none of": {"position_embedding_type": "absolute"},
    "num_cdq_heads=3 must be 0, half of num_heads=4": {**CDQ, "num_cdq_heads": 3},
    "decoder_self_attention_layer is T5CDQAttention": {
        "decoder_self_attention_layer": "modeling_t5:T5CDQAttention",
        "num_cdq_heads": 2,
    },
    "decoder_cross_attention_layer is T5CDQAttention": {"decoder_cross_attention_layer": "modeling_t5:T5CDQAttention"},
    "encoder_self_attention_layer='modeling_t5:Nothing': modeling_t5 has no Nothing": {
        "encoder_self_attention_layer": "modeling_t5:Nothing"
    },
    "num_heads=0 must be at least 1": {"num_heads": 0},
    "num_memory_tokens=-1 must not be negative": {"num_memory_tokens": -1},
    "num_cdq_heads=2 is of T5CDQAttention": {"num_cdq_heads": 2},
    "rotary_dim=2 is of position_embedding_type": {"rotary_dim": 2},
    "tie_word_embeddings='no' must be true or false": {"tie_word_embeddings": "no"},
    "feed_forward_proj='gated-foo' names no activation": {"feed_forward_proj": "gated-foo"},
    "label_smoothing=1.5 must be": {"label_smoothing": 1.5},
}


@pytest.mark.parametrize(("sentence", "settings"), BAD.items())
def test_what_cannot_be_is_a_sentence(sentence, settings):
    with pytest.raises(ValueError, match=sentence) as error:
        make(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"cross_entropy_chunk_size": 1.5}, {"z_loss": "1e-4"}, {"qk_norm": "no"}, {"position_embedding_type": 3}],
    ids=str,
)
def test_a_setting_of_another_type_is_refused_by_name(settings):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{next(iter(settings))}'"):
        make(**settings)


def test_calls_that_cannot_be_are_a_sentence():
    model, inputs = make(num_memory_tokens=2), batch()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(attention_mask=inputs["attention_mask"], labels=inputs["labels"])
    with pytest.raises(ValueError, match="use_cache=True is for decoders"):
        model.encoder(inputs["input_ids"], use_cache=True)
    length = inputs["input_ids"].shape[1]
    for shape in ((1, length, length), (length, length)):
        with pytest.raises(ValueError, match="num_memory_tokens=2 takes an attention_mask"):
            model(**{**inputs, "attention_mask": torch.ones(2, *shape, dtype=torch.long)})
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id=None"):
        model(**inputs)


@variants
def test_one_token_and_rows_of_padding_give_finite_numbers(settings):
    model = make(**settings)
    one = {"input_ids": torch.tensor([[5], [6]]), "labels": torch.tensor([[7], [-100]])}
    inputs = batch()
    inputs["attention_mask"][1] = 0
    inputs["labels"][0] = -100
    for ragged in (one, inputs):
        loss, found = gradients(model, **ragged)
        assert loss.isfinite() and all(gradient.isfinite().all() for gradient in found.values())
    alone = {name: values[:1] for name, values in batch().items()}
    together = {**batch(), "attention_mask": inputs["attention_mask"]}
    together["attention_mask"][0] = alone["attention_mask"][0]
    if model.config.cross_entropy_chunk_size == 0:  # the other row does not feel it
        torch.testing.assert_close(model(**together).logits[:1], model(**alone).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_of_one_row_is_that_mask_in_each_row(implementation):
    model, inputs = make(T5EncoderModel), batch()
    model.set_attn_implementation(implementation)
    masks = inputs["attention_mask"][:1], inputs["attention_mask"][:1].expand(2, -1)
    found, expected = (model(inputs["input_ids"], attention_mask=mask).last_hidden_state for mask in masks)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@variants
def test_the_gpu_computes_the_same(settings):
    model = make(**settings).double()
    wanted = gradients(model, **batch())
    inputs = {name: values.cuda() for name, values in batch().items()}
    loss, found = gradients(model.cuda(), **inputs)
    # the norms compute in float32
    torch.testing.assert_close(loss.cpu(), wanted[0], rtol=1e-6, atol=0)
    torch.testing.assert_close({name: g.cpu() for name, g in found.items()}, wanted[1], rtol=1e-4, atol=1e-6)
    del inputs["labels"]
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "num_beams": 2}
    written = model.generate(**inputs, **options).cpu()
    assert torch.equal(written, model.cpu().generate(**{k: v.cpu() for k, v in inputs.items()}, **options))


@pytest.mark.slow
@pytest.mark.parametrize("classifies", [False, True])
def test_export_with_free_lengths_equals_the_model(classifies):
    """As torch.export traces it, with lengths that are no numbers yet."""
    from torch.export import Dim, export

    torch.manual_seed(0)
    cls = T5ForSequenceClassification if classifies else T5ForConditionalGeneration
    model = cls(T5Config(**SIZES, eos_token_id=1)).eval()
    batch, source, target = Dim("batch", min=2, max=8), Dim("source", min=4, max=64), Dim("target", min=4, max=64)

    def inputs(length: int, target_length: int) -> dict[str, object]:
        ids = torch.randint(2, 32, (3, length), generator=torch.Generator().manual_seed(length))
        ids[:, -1] = 1
        return {"input_ids": ids, "decoder_input_ids": ids[:, :target_length].clone(), "use_cache": False}

    shapes = {"input_ids": {0: batch, 1: source}, "decoder_input_ids": {0: batch, 1: target}, "use_cache": None}
    if classifies:  # which reads the decoder at the places of the encoder's input
        shapes["decoder_input_ids"] = {0: batch, 1: source}
    with torch.no_grad():
        program = export(model, (), inputs(11, 11 if classifies else 7), dynamic_shapes=shapes).module()
        other = inputs(16, 16 if classifies else 9)
        torch.testing.assert_close(program(**other).logits, model(**other).logits, rtol=0, atol=1e-6)
