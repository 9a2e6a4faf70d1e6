"""transformers' T5Gemma and the text part of its T5Gemma 2 as our T5, and back, in fp64.

Logits, gradients and generated tokens are equal.

transformers computes norms, softmax and positions of an fp64 model in fp32, so these are made fp64 here, in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    T5Gemma2ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

import modeling_t5
from lm_experiments_tools.errors import UserError
from modeling_t5.t5gemma import config_of, from_t5gemma, name_of, t5gemma_config_of, text_config, to_t5gemma

EXACT = {"rtol": 0.0, "atol": 1e-10}
PART = {
    "vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "num_hidden_layers": 2, "sliding_window": 3, "query_pre_attn_scalar": 10,
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
}  # fmt: skip
FULL, LOCAL = "full_attention", "sliding_attention"
CASES = {
    "as published": {},
    "deep decoder": {"decoder": {"num_hidden_layers": 4}},
    "one of three global": {"both": {"num_hidden_layers": 3, "layer_types": [LOCAL, LOCAL, FULL]}},
    "all global, no caps": {
        "both": {
            "layer_types": [FULL, FULL], "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "num_key_value_heads": 4,
        }
    },
    "all local": {"both": {"layer_types": [LOCAL, LOCAL]}},
    "untied": {"tie_word_embeddings": False},
    "other base": {"both": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
}  # fmt: skip
ROPES = {FULL: {"rope_type": "default", "rope_theta": 900.0}, LOCAL: {"rope_type": "default", "rope_theta": 50.0}}
# The root of the width is exact: T5Gemma 2 keeps it in fp32. It ignores attn_logit_softcapping.
SECOND = {"hidden_size": 36, "rope_parameters": ROPES, "layer_types": [LOCAL, FULL]}
MERGED_CASES = {
    "merged, as published": {"both": SECOND},
    "merged, even window": {"both": {**SECOND, "sliding_window": 4}},
    "merged, deep encoder": {"both": SECOND, "encoder": {"num_hidden_layers": 3, "layer_types": [LOCAL, FULL, LOCAL]}},
    "merged, all global, no groups": {"both": {**SECOND, "layer_types": [FULL, FULL], "num_key_value_heads": 4}},
    "merged, all local": {"both": {**SECOND, "layer_types": [LOCAL, LOCAL]}},
    "merged, untied": {"both": SECOND, "tie_word_embeddings": False},
}
CASES |= MERGED_CASES


@pytest.fixture(autouse=True)
def exact(monkeypatch) -> None:
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim, dtype=torch.float64)
    )


def t5gemma(encoder=(), decoder=(), both=(), seed: int = 0, **changes) -> PreTrainedModel:
    """A random T5Gemma, or a T5Gemma 2 if local and global layers have positions of their own."""
    torch.manual_seed(seed)
    parts = [{**PART, **dict(both), **dict(part)} for part in (encoder, decoder)]
    is_merged = LOCAL in parts[1].get("rope_parameters", ())
    if is_merged:
        model = T5Gemma2ForConditionalGeneration(text_config(*parts, **changes)).double().eval()
        stacks = model.model.encoder.text_model, model.model.decoder
    else:
        config = T5GemmaConfig(encoder=parts[0], decoder=parts[1], vocab_size=70, **changes)
        model = T5GemmaForConditionalGeneration(config).double().eval()
        stacks = model.model.encoder, model.model.decoder
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        for stack in stacks:
            stack.rotary_emb.forward = rotary_in_fp64(stack.config.rope_parameters)
    return model


def rotary_in_fp64(ropes: dict) -> Callable[..., tuple[Tensor, Tensor]]:
    """transformers' cosines and sines [1, length, head_dim], whose angles it always makes in fp32."""

    def forward(_: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        base = (ropes if layer_type is None else ropes[layer_type])["rope_theta"]
        frequencies = base ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    return forward


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, 70, (2, n), generator=generator) for n in (9, 8))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels[0, 7:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def results(model: torch.nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients."""
    model.zero_grad()
    inputs = batch()
    starts = model.prepare_decoder_input_ids_from_labels(inputs["labels"])
    output = model(**inputs, decoder_input_ids=starts, decoder_attention_mask=torch.ones_like(starts))
    output.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if not of_images(name)}
    return output.logits, output.loss, gradients


def of_images(name: str) -> bool:
    return any(part in name for part in ("vision", "multi_modal", "eoi_"))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "block_sparse"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, implementation: str) -> None:
    theirs = t5gemma(**CASES[case])
    ours = from_t5gemma(theirs)
    ours.set_attn_implementation(implementation)
    (logits, loss, gradients), (expected, expected_loss, others) = results(ours), results(theirs)
    torch.testing.assert_close(logits, expected, **EXACT)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    renamed = {name_of(name, case in MERGED_CASES): gradient for name, gradient in others.items()}
    tables = [name for name in renamed if name.endswith("embed_tokens.weight")]
    renamed["shared.weight"] = renamed.pop(sorted(tables)[0])
    assert renamed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, renamed[name], **EXACT, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_and_through_files_are_the_same_weights(case: str, tmp_path) -> None:
    theirs = t5gemma(**CASES[case])
    ours = from_t5gemma(theirs)
    ours.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(loaded) is modeling_t5.T5ForConditionalGeneration
    back = to_t5gemma(loaded)
    for name, weight in theirs.state_dict().items():
        if of_images(name):
            continue
        torch.testing.assert_close(back.state_dict()[name], weight, rtol=0, atol=1e-14, msg=name)
    assert config_of(back.config).to_dict() == config_of(theirs.config).to_dict()


@pytest.mark.parametrize("case", ["as published", "merged, as published", "merged, even window"])
def test_generated_tokens_are_those_of_transformers_with_and_without_a_cache(case: str) -> None:
    theirs = t5gemma(**CASES[case])
    ours, inputs = from_t5gemma(theirs), {name: value for name, value in batch().items() if name != "labels"}
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = theirs.generate(**inputs, **options)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(**inputs, **options, use_cache=use_cache), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(**inputs, **options, **static), expected)


@pytest.mark.parametrize("case", ["as published", "merged, as published"])
def test_training_by_the_fast_step_gives_the_same_gradients(case: str) -> None:
    ours = from_t5gemma(t5gemma(**CASES[case])).train()
    _, loss, gradients = results(ours)
    ours.use_fast_step()
    _, fast_loss, fast = results(ours)
    torch.testing.assert_close(fast_loss, loss, **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast[name], gradient, **EXACT, msg=name)


def test_packed_rows_are_refused_by_merged_attention() -> None:
    ours, ids = from_t5gemma(t5gemma(**CASES["merged, as published"])), batch()["input_ids"]
    with pytest.raises(ValueError, match="T5MergedAttention does not support packed rows"):
        ours(input_ids=ids, labels=ids, segment_ids=ids > 9, decoder_segment_ids=ids > 9)


def test_images_do_not_come_along() -> None:
    theirs = t5gemma(**CASES["merged, as published"])
    assert not [name for name in from_t5gemma(theirs).state_dict() if of_images(name)]
    assert [name for name in theirs.state_dict() if of_images(name)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "both": {
                    **SECOND,
                    "rope_parameters": {**ROPES, FULL: {**ROPES[FULL], "rope_type": "linear", "factor": 8}},
                }
            },
            "no rope_type linear",
        ),
        ({"encoder": {"hidden_size": 36}}, "encoders of other sizes"),
        ({"both": {"layer_types": [FULL, LOCAL]}}, "irregular layer_types"),
        ({"both": {"hidden_activation": "silu"}}, "another activation"),
        ({"both": {"attention_bias": True}}, "attention_bias"),
    ],
)
def test_a_t5gemma_that_is_no_t5_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(t5gemma(**changes).config)


def changed(case: str, **changes) -> modeling_t5.T5ForConditionalGeneration:
    """Our T5 of another configuration than that of a T5Gemma, as config.json would hold it."""
    settings = config_of(t5gemma(**CASES[case]).config).to_dict() | changes
    config = modeling_t5.T5Config(**{name: value for name, value in settings.items() if value is not ...})
    torch.manual_seed(0)
    return modeling_t5.T5ForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("as published", {"position_embedding_type": "relative_attention_bias"}),
        ("as published", {"scale_decoder_outputs": True}),
        ("as published", {"rotary_dim": 4}),
        ("as published", {"qk_norm": True}),
        ("as published", {"post_norms": False}),
        ("as published", {"scale_embeddings": False}),
        ("as published", {"separate_encoder_embeddings": False}),
        ("as published", {"feed_forward_proj": "gated-relu"}),
        ("as published", {"feed_forward_proj": "relu"}),
        ("as published", {"encoder_local_attention": [1, 1]}),
        ("as published", {"local_rotary_base": 50.0}),
        ("as published", {"attention_scale": 0.3}),
        ("as published", {"attention_scale": 2.0}),
        ("merged, as published", {"separate_encoder_embeddings": True}),
        ("merged, as published", {"encoder_local_attention": None}),
        ("merged, as published", {"attention_softcap": 1.5}),
        ("merged, as published", {"qk_norm": False}),
    ],
)
def test_a_t5_that_would_have_other_logits_is_not_written(case: str, changes: dict) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(
        UserError, match=re.escape(f"cannot be written as T5Gemma{' 2' * (case != 'as published')}: ")
    ) as e:
        to_t5gemma(changed(case, **changes))
    assert str(e.value).endswith(f": {name}={value!r}.")


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    config = modeling_t5.T5Config(d_model=512, num_heads=6)  # mT5-small's
    with pytest.raises(UserError, match="d_model=512 to be a multiple of num_heads=6"):
        t5gemma_config_of(config)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("as published", {"bos_token_id": ...}),
        ("as published", {"final_softcap": 2, "rotary_base": 100}),
        ("as published", {"local_attention": None}),
        ("as published", {"num_key_value_heads": None}),
        ("as published", {"num_decoder_layers": 3, "global_attn_every_n_layers": 6}),
        ("as published", {"num_layers": 3, "global_attn_every_n_layers": 6}),
        ("merged, as published", {"local_rotary_base": None}),
        ("merged, as published", {"local_attention": None, "encoder_local_attention": None}),
    ],
)
def test_a_t5_with_settings_left_out_is_written_with_its_logits_and_loss(case: str, changes: dict) -> None:
    ours = changed(case, **changes)
    theirs = to_t5gemma(ours)
    for stack in (theirs.model.decoder, getattr(theirs.model.encoder, "text_model", theirs.model.encoder)):
        stack.rotary_emb.forward = rotary_in_fp64(stack.config.rope_parameters)
    (logits, loss, _), (expected, expected_loss, _) = results(theirs), results(ours)
    torch.testing.assert_close(logits, expected, **EXACT)
    torch.testing.assert_close(loss, expected_loss, **EXACT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "must divide num_attention_heads"),
        ({"final_softcap": 3.0, "cross_entropy_chunk_size": 8}, "knows no final_softcap"),
        ({"attention_softcap": 0.0}, "attention_softcap=0.0 must be above 0"),
        ({"sparse_config_cls": "BigBird", "local_attention": 4}, "leave them out"),
        ({"local_attention": 4, "encoder_local_attention": [4]}, "must be two numbers of tokens"),
        ({"encoder_local_attention": [4, 4]}, "set local_attention too"),
        ({"local_rotary_base": 50.0}, 'local_rotary_base=50.0 is of position_embedding_type "rotary"'),
        ({"global_attn_every_n_layers": 0}, "at least 1"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        modeling_t5.T5Config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_self_attention_layer": "modeling_t5:T5MergedAttention"}, "for decoder_self_attention_layer alone"),
        (
            {"decoder_self_attention_layer": "modeling_t5:T5MergedAttention"},
            "T5MergedAttention does not support position_embedding_type",
        ),
    ],
)
def test_merged_attention_where_it_cannot_be_is_refused(changes: dict, message: str) -> None:
    config = modeling_t5.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, **changes)
    with pytest.raises(ValueError, match=message):
        modeling_t5.T5ForConditionalGeneration(config)
