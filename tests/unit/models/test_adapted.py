"""Encoders and encoder-decoders made of decoders, in fp64: with a causal mask, or without cross-attention, they are
the decoder; they are what transformers' classes make of the same weights; saved and loaded they are themselves."""

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.adapted import (
    ENCODER_DECODERS,
    ENCODERS,
    adapted_encoder,
    adapted_encoder_decoder,
)
from modeling_t5.t5gemma import from_t5gemma
from tests.helpers.decoder_toys import toy_decoder, toy_ids

EXACT = {"rtol": 0.0, "atol": 1e-10}
IDS, TARGETS = toy_ids(11), toy_ids(7, seed=1)


def causal_masks(length: int, window: int) -> dict[str, torch.Tensor]:
    """transformers' additive masks [1, 1, length, length] of causal layers, without and with a window."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    allowed = {"full_attention": distance >= 0, "sliding_attention": (distance >= 0) & (distance < window)}
    lowest = torch.finfo(torch.float64).min
    return {
        name: torch.zeros(mask.shape).double().masked_fill(~mask, lowest)[None, None] for name, mask in allowed.items()
    }


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, decoder_input_ids=TARGETS).logits.square().mean().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_with_a_causal_mask_has_the_hidden_states_and_logits_of_the_decoder(kind: str, tied: bool) -> None:
    source = toy_decoder(kind, tie_word_embeddings=tied)
    encoder = adapted_encoder(source, mask_token_id=5, pad_token_id=0)
    masks = causal_masks(IDS.shape[1], window=4)
    mask = masks if kind.startswith("gemma") else masks["full_attention"]
    mask = {"full_attention": masks["full_attention"]} if kind == "qwen3" else mask

    found = encoder(IDS, attention_mask=mask, output_hidden_states=True)
    expected = source(IDS, output_hidden_states=True)

    torch.testing.assert_close(found.logits, expected.logits, **EXACT)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    assert (encoder.lm_head.weight is encoder.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_sees_later_tokens_up_to_its_window_and_no_padding(kind: str, padded: bool) -> None:
    changes = {"layer_types": ["sliding_attention"] * 2} if kind.startswith("gemma") else {}
    encoder = adapted_encoder(toy_decoder(kind, **changes), mask_token_id=5, pad_token_id=0)
    mask = torch.ones_like(IDS)
    mask[:, 10:] = not padded
    other = IDS.clone()
    other[:, 10] = 3

    differs = (encoder(IDS, mask).logits - encoder(other, mask).logits).abs().amax((0, 2))[:10] > 0

    reach = 8 if changes else 10  # two layers, each a window of 4 to either side
    expected = torch.arange(10) >= 10 - reach
    assert differs.tolist() == (expected & (not padded)).tolist()


def test_the_loss_of_an_encoder_is_the_cross_entropy_of_labelled_positions_unshifted() -> None:
    encoder = adapted_encoder(toy_decoder("gemma2"), mask_token_id=5, pad_token_id=0)
    labels = torch.full_like(IDS, -100)
    labels[0, 3], labels[1, 8] = 7, 9
    output = encoder(IDS, labels=labels)
    expected = -(output.logits[0, 3].log_softmax(-1)[7] + output.logits[1, 8].log_softmax(-1)[9]) / 2
    torch.testing.assert_close(output.loss, expected.float())  # transformers' loss is in fp32


def test_a_t5gemma_2_whose_encoder_states_are_masked_has_the_logits_of_its_source() -> None:
    source = toy_decoder("gemma3_text")
    model = adapted_encoder_decoder(source, seed=0)
    assert isinstance(model, T5Gemma2ForConditionalGeneration)
    found = model(input_ids=IDS, attention_mask=torch.zeros_like(IDS), decoder_input_ids=TARGETS).logits
    torch.testing.assert_close(found, source(TARGETS).logits, **EXACT)
    seen = model(input_ids=IDS, decoder_input_ids=TARGETS).logits
    assert (seen - found).abs().max() > 1e-3


def built_by_transformers(source: torch.nn.Module) -> torch.nn.Module:
    """The T5Gemma, or for Gemma 3 the T5Gemma 2, into whose modules those of the source are copied one by one."""
    shared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar", "layer_types",
    )  # fmt: skip
    part = {name: getattr(source.config, name) for name in shared}
    if source.config.model_type == "gemma2":
        config = T5GemmaConfig(encoder=part, decoder=part, vocab_size=part["vocab_size"])
        model = T5GemmaForConditionalGeneration(config).double().eval()
        encoder = model.model.encoder
    else:
        vision = {"model_type": "siglip_vision_model", "hidden_size": 12, "num_hidden_layers": 0, "image_size": 16}
        both = {"text_config": part, "vision_config": vision}
        config = T5Gemma2Config(encoder=both, decoder=part)
        model = T5Gemma2ForConditionalGeneration(config).double().eval()
        encoder = model.model.encoder.text_model
    norms = {"pre_self_attn": "input", "post_self_attn": "post_attention"}
    norms |= {name: name for name in ("pre_feedforward", "post_feedforward")}
    crossed = {"pre_cross_attn": "input", "post_cross_attn": "post_attention"}
    for ours in (encoder, model.model.decoder):
        ours.embed_tokens.weight.data.copy_(source.model.embed_tokens.weight)
        ours.norm.load_state_dict(source.model.norm.state_dict())
        for layer, theirs in zip(ours.layers, source.model.layers, strict=True):
            has_cross = hasattr(layer, "cross_attn")
            layer.self_attn.load_state_dict(theirs.self_attn.state_dict())
            layer.mlp.load_state_dict(theirs.mlp.state_dict())
            for name, of in (norms | (crossed if has_cross else {})).items():
                norm = getattr(theirs, f"{of}_layernorm").state_dict()
                getattr(layer, f"{name}_layernorm").load_state_dict(norm)
            if has_cross:
                layer.cross_attn.load_state_dict(theirs.self_attn.state_dict())
    model.tie_weights()
    return model


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_a_saved_encoder_decoder_equals_the_one_that_transformers_builds_of_the_same_weights(kind, tmp_path) -> None:
    source = toy_decoder(kind)
    adapted_encoder_decoder(source, seed=0).save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    direct = built_by_transformers(source)
    assert type(model) is type(direct)

    inputs = {"input_ids": IDS, "decoder_input_ids": TARGETS}
    torch.testing.assert_close(model(**inputs).logits, direct(**inputs).logits, **EXACT)
    found, expected = gradients(model), gradients(direct)
    for name, gradient in found.items():
        if "eoi_embedding" not in name:
            torch.testing.assert_close(gradient, expected[name], **EXACT)
    no_gradient = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert not [name for name in no_gradient if "vision" not in name and "multi_modal" not in name]


def test_merged_attention_without_an_encoder_is_the_decoder_it_was_made_of() -> None:
    source = toy_decoder("gemma3_text")
    ours = from_t5gemma(adapted_encoder_decoder(source, seed=0))
    found, expected = ours.decoder(TARGETS).last_hidden_state, source.model(TARGETS).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # transformers' norms are fp32
    assert not torch.allclose(ours.decoder(TARGETS, encoder_hidden_states=found)[0], expected, atol=1e-2)


def test_an_encoder_of_another_width_gets_random_cross_attention_of_the_seed() -> None:
    source = toy_decoder("gemma2", tie_word_embeddings=False)
    wide = toy_decoder("gemma2", seed=1, hidden_size=64, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    first, second, other = (adapted_encoder_decoder(source, wide, seed=seed) for seed in (0, 0, 1))
    weight = "model.decoder.layers.0.cross_attn.k_proj.weight"
    assert first.get_parameter(weight).shape == (8, 64)
    assert torch.equal(first.get_parameter(weight), second.get_parameter(weight))
    assert not torch.equal(first.get_parameter(weight), other.get_parameter(weight))
    assert not first.config.tie_word_embeddings
    kept = "model.decoder.layers.0.self_attn.k_proj.weight"
    assert torch.equal(first.get_parameter(kept), source.get_parameter("model.layers.0.self_attn.k_proj.weight"))
    states = first.model.encoder(IDS).last_hidden_state
    torch.testing.assert_close(states, adapted_encoder(wide, 5, 0).model(IDS).last_hidden_state, **EXACT)
    with torch.no_grad():
        for layer in first.model.decoder.layers:
            layer.cross_attn.o_proj.weight.zero_()
    logits = first(input_ids=IDS, decoder_input_ids=TARGETS).logits
    torch.testing.assert_close(logits, source(TARGETS).logits, **EXACT)


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_an_encoder_decoder_generates_what_it_scores_highest(kind: str) -> None:
    model = adapted_encoder_decoder(toy_decoder(kind), seed=0)
    made = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, min_new_tokens=5)
    logits = model(input_ids=IDS, decoder_input_ids=made[:, :-1]).logits
    logits[..., 1] = float("-inf")  # EOS, which generation was not to write
    assert torch.equal(made[:, 1:], logits.argmax(-1))
    assert made[0, 0] == model.config.decoder.bos_token_id


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {}, "a Llama.* cannot become an encoder-decoder: T5Gemma's classes need a Gemma 2 or Gemma 3. Make"),
        ("qwen3", {}, "a Qwen3.* cannot become an encoder-decoder: T5Gemma's"),
        ("gemma2", {"bos_token_id": None}, "no bos_token_id"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional already"),
    ],
)
def test_sources_of_no_encoder_decoder_are_refused(kind: str, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapted_encoder_decoder(toy_decoder(kind, **changes), seed=0)


def test_sources_of_no_encoder_are_refused() -> None:
    window = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 4}
    for source, message in (
        (toy_decoder("gemma2").model, "a Gemma2Model .* cannot become an encoder: sources are gemma2"),
        (toy_decoder("qwen2", **window), "use_sliding_window"),
        (toy_decoder("llama", mlp_bias=True), "mlp_bias"),
    ):
        with pytest.raises(UserError, match=message):
            adapted_encoder(source, 5, 0)


def test_two_models_that_make_no_pair_are_refused() -> None:
    for encoder, message in (
        (toy_decoder("gemma3_text"), "two Gemma 2 models, not gemma2 and gemma3_text"),
        (toy_decoder("gemma2", vocab_size=700), "has 700 tokens, the source 640"),
    ):
        with pytest.raises(UserError, match=message):
            adapted_encoder_decoder(toy_decoder("gemma2"), encoder, seed=0)
