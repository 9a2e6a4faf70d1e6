"""transformers' T5Gemma as our T5, and back, in fp64.

Logits, gradients and generated tokens are equal.

transformers computes norms, softmax and positions of an fp64 model in fp32, so these are made fp64 here, in both.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, T5GemmaConfig, T5GemmaForConditionalGeneration

import modeling_t5
from lm_experiments_tools.errors import UserError
from modeling_t5.t5gemma import config_of, from_t5gemma, name_of, t5gemma_config_of, to_t5gemma

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


@pytest.fixture(autouse=True)
def exact(monkeypatch) -> None:
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim, dtype=torch.float64)
    )


def t5gemma(encoder=(), decoder=(), both=(), seed: int = 0, **changes) -> T5GemmaForConditionalGeneration:
    """A random T5Gemma."""
    torch.manual_seed(seed)
    parts = [{**PART, **dict(both), **dict(part)} for part in (encoder, decoder)]
    config = T5GemmaConfig(encoder=parts[0], decoder=parts[1], vocab_size=70, **changes)
    model = T5GemmaForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return rotary_in_fp64(model)


def rotary_in_fp64(model: T5GemmaForConditionalGeneration) -> T5GemmaForConditionalGeneration:
    """With cosines and sines [1, length, head_dim] in fp64, whose angles transformers always makes in fp32."""

    def forward(_: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = base ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    base = model.config.decoder.rope_parameters["rope_theta"]
    for stack in (model.model.encoder, model.model.decoder):
        stack.rotary_emb.forward = forward
    return model


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
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return output.logits, output.loss, gradients


@pytest.mark.parametrize(
    ("case", "implementation"),
    [*((case, "sdpa") for case in CASES), ("as published", "eager"), ("as published", "block_sparse")],
)
def test_logits_and_gradients_are_those_of_transformers(case: str, implementation: str) -> None:
    theirs = t5gemma(**CASES[case])
    ours = from_t5gemma(theirs)
    ours.set_attn_implementation(implementation)
    (logits, loss, gradients), (expected, expected_loss, others) = results(ours), results(theirs)
    torch.testing.assert_close(logits, expected, **EXACT)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    renamed = {name_of(name): gradient for name, gradient in others.items()}
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
        torch.testing.assert_close(back.state_dict()[name], weight, rtol=0, atol=1e-14, msg=name)
    assert config_of(back.config).to_dict() == config_of(theirs.config).to_dict()


def test_generated_tokens_are_those_of_transformers_with_and_without_a_cache() -> None:
    theirs = t5gemma()
    ours, inputs = from_t5gemma(theirs), {name: value for name, value in batch().items() if name != "labels"}
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    expected = theirs.generate(**inputs, **options)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(**inputs, **options, use_cache=use_cache), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(**inputs, **options, **static), expected)


def test_training_by_the_fast_step_gives_the_same_gradients() -> None:
    ours = from_t5gemma(t5gemma()).train()
    _, loss, gradients = results(ours)
    ours.use_fast_step()
    _, fast_loss, fast = results(ours)
    torch.testing.assert_close(fast_loss, loss, **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast[name], gradient, **EXACT, msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"both": {"rope_parameters": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0}}},
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


def changed(**changes) -> modeling_t5.T5ForConditionalGeneration:
    """Our T5 of another configuration than that of a T5Gemma, as config.json would hold it."""
    settings = config_of(t5gemma().config).to_dict() | changes
    config = modeling_t5.T5Config(**{name: value for name, value in settings.items() if value is not ...})
    torch.manual_seed(0)
    return modeling_t5.T5ForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": "relative_attention_bias"},
        {"scale_decoder_outputs": True},
        {"rotary_dim": 4},
        {"qk_norm": True},
        {"post_norms": False},
        {"scale_embeddings": False},
        {"separate_encoder_embeddings": False},
        {"feed_forward_proj": "gated-relu"},
        {"attention_scale": 0.3},
        {"attention_scale": 2.0},
    ],
)
def test_a_t5_that_would_have_other_logits_is_not_written(changes: dict) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(UserError, match=re.escape("cannot be written as T5Gemma: ")) as e:
        to_t5gemma(changed(**changes))
    assert str(e.value).endswith(f": {name}={value!r}.")


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    config = modeling_t5.T5Config(d_model=512, num_heads=6)  # mT5-small's
    with pytest.raises(UserError, match="d_model=512 to be a multiple of num_heads=6"):
        t5gemma_config_of(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"bos_token_id": ...},
        {"final_softcap": 2, "rotary_base": 100},
        {"local_attention": None},
        {"num_key_value_heads": None},
        {"num_decoder_layers": 3, "global_attn_every_n_layers": 6},
        {"num_layers": 3, "global_attn_every_n_layers": 6},
    ],
)
def test_a_t5_with_settings_left_out_is_written_with_its_logits_and_loss(changes: dict) -> None:
    ours = changed(**changes)
    theirs = rotary_in_fp64(to_t5gemma(ours))
    (logits, loss, _), (expected, expected_loss, _) = results(theirs), results(ours)
    torch.testing.assert_close(logits, expected, **EXACT)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
