"""Models of transformers with our attention against their own eager attention, in float64."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from lm_experiments_tools.attention import get_sparsity_config, huggingface
from lm_experiments_tools.attention.huggingface import enable
from lm_experiments_tools.errors import UserError

LENGTH = 37  # no multiple of any block here
PADDING = torch.ones(3, LENGTH, dtype=torch.long)
PADDING[1, 20:] = 0
PADDING[2, 5:] = 0
IDS = torch.randint(1, 64, (3, LENGTH), generator=torch.Generator().manual_seed(0))
TOLERANCE = 1e-10


def t5(cls: type = T5ForConditionalGeneration, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=layers, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = cls(config).double()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(parameter)
    return model


def bert(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config).double()
    model.set_attn_implementation("eager")
    return model


def batch(model: nn.Module) -> dict[str, Tensor]:
    """Padded inputs and ragged targets."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, 64, (3, 11 if model.config.is_encoder_decoder else LENGTH), generator=generator)
    labels[2, 5:] = -100
    return {"input_ids": IDS, "attention_mask": PADDING, "labels": labels}


def gradients(model: nn.Module, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert (got[name] - expected[name]).abs().max() < TOLERANCE, name


def convert(model: nn.Module, *layout: Any, **settings: Any) -> nn.Module:
    return enable(copy.deepcopy(model), *layout, **settings)


@pytest.fixture(params=["blocks", "sdpa"])
def backend(request, monkeypatch) -> str:
    """The backend that computes attention, whatever is fastest at these lengths."""
    forced = functools.partial(huggingface.block_sparse_attention, backend=request.param)
    monkeypatch.setattr(huggingface, "block_sparse_attention", forced)
    return request.param


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "checkpointed_reentrant"])
@pytest.mark.parametrize("make", [t5, bert])
def test_dense_layout_equals_eager_in_loss_and_every_gradient(make, reentrant, backend):
    model = make()
    ours = convert(model, "Dense")
    if reentrant is not None:
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss, grads = gradients(ours, **batch(model))
    expected_loss, expected = gradients(model, **batch(model))
    assert abs(loss - expected_loss) < TOLERANCE
    assert_equal_gradients(grads, expected)
    for name, gradient in grads.items():
        if "relative_attention_bias" in name:
            assert gradient.abs().max() > 1e-4 and gradient.sum(0).abs().max() < 1e-12


def allowed_tokens(config: Any, length: int = LENGTH) -> Tensor:
    """Keys that a layout lets queries attend to, bool [1, heads, queries, keys]."""
    blocks = config.make_layout(-(-length // config.block) * config.block).bool()
    tokens = blocks.repeat_interleave(config.block, 1).repeat_interleave(config.block, 2)
    return tokens[None, :, :length, :length]


@pytest.mark.parametrize("make", [lambda: t5(T5EncoderModel), bert], ids=["t5", "bert"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_sparse_layout_equals_eager_with_the_layout_as_a_mask(make, checkpointed, backend):
    """Each head another pattern, and every query keeps some key, so that no row is undefined in eager attention."""
    config = get_sparsity_config(
        "Fixed", 4, block=4, different_layout_per_head=True, num_different_global_patterns=4,
        horizontal_global_attention=True,
    )  # fmt: skip
    model = make()
    ours = convert(model, config)
    if checkpointed:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    rows = PADDING.clone()
    rows[2] = 0  # its few tokens are all in one block, which other windows' queries do not see
    results = []
    allowed = allowed_tokens(config) & PADDING.bool()[:, None, None, :]
    added = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    for each, mask in ((ours, PADDING), (model, added)):
        each.train()
        each.zero_grad()
        output = each(IDS, attention_mask=mask)[0]
        (output * rows[:, :, None]).square().sum().backward()
        grads = {name: parameter.grad for name, parameter in each.named_parameters() if parameter.grad is not None}
        results.append((output.detach()[rows.bool()], grads))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=TOLERANCE)
    assert_equal_gradients(results[0][1], results[1][1])
    assert not torch.allclose(results[0][0], convert(model, "Dense")(IDS, attention_mask=PADDING)[0][rows.bool()])


@pytest.mark.parametrize("options", [{"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generation_equals_eager(options):
    model = t5().eval()
    ours = convert(model, "Dense").eval()
    got, expected = (m.generate(IDS, attention_mask=PADDING, max_new_tokens=9, **options) for m in (ours, model))
    assert torch.equal(got, expected)


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """Arguments that our attention is given."""
    seen: list[dict[str, Any]] = []
    attend: Callable[..., Tensor] = huggingface.block_sparse_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, layout: Any, **options: Any) -> Tensor:
        seen.append({"layout": layout, "shape": (q.shape[2], k.shape[2]), **options})
        return attend(q, k, v, layout, **options)

    monkeypatch.setattr(huggingface, "block_sparse_attention", spy)
    return seen


def test_only_the_encoder_is_sparse(calls):
    model = convert(t5(), "BigBird", block=4)
    model(**batch(model))
    encoder, decoder = calls[:2], calls[2:]
    assert [call["shape"] for call in calls] == [(37, 37)] * 2 + [(11, 11), (11, 37)] * 2
    assert all(type(call["layout"]).__name__ == "BigBirdSparsityConfig" and not call["causal"] for call in encoder)
    assert [call["causal"] for call in decoder] == [True, False] * 2
    assert all(call["layout"] is None for call in decoder)
    model(input_ids=IDS, attention_mask=PADDING, labels=IDS)  # cross-attention of as many queries as keys
    assert [call["causal"] for call in calls[6:]] == [False] * 2 + [True, False] * 2
    layers = [call["layout"].make_layout(40) for call in encoder]
    assert not torch.equal(*layers), "layers with random blocks draw their own"


def test_from_pretrained_with_the_name_alone_respects_padding(tmp_path, calls):
    model = bert().eval()
    model.save_pretrained(tmp_path)
    ours = AutoModel.from_pretrained(tmp_path, attn_implementation="block_sparse", dtype=torch.float64)
    got = ours(IDS, attention_mask=PADDING).last_hidden_state
    expected = model.bert(IDS, attention_mask=PADDING).last_hidden_state
    real = PADDING.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=TOLERANCE)
    assert len(calls) == 2 and calls[0]["layout"] is None
    other = torch.where(real, IDS, 63 - IDS)
    assert torch.equal(ours(other, attention_mask=PADDING).last_hidden_state[real], got[real])


def test_the_layout_is_saved_with_the_model_and_loaded(tmp_path):
    model = convert(t5(), "deepspeed.ops.sparse_attention:BigBirdSparsityConfig", block=4, seed=3)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["sparse_config_cls"] == "BigBirdSparsityConfig" and stored["sparse_attention"]["seed"] == 3
    for folder in (tmp_path, tmp_path / "again"):
        loaded = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
        assert torch.equal(loaded(**batch(model)).loss, model(**batch(model)).loss)
        enable(loaded).save_pretrained(tmp_path / "again")  # without it transformers would not save the name again
    dense = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    assert not torch.allclose(dense(**batch(model)).loss, model(**batch(model)).loss)
    enable(dense)  # what its configuration says
    assert torch.equal(dense(**batch(model)).loss, model(**batch(model)).loss)


def test_a_mask_of_queries_by_keys_is_added_to_the_layout():
    config = get_sparsity_config("LocalSlidingWindow", 4, block=4, attention="bidirectional")
    model = bert().eval()
    banded = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool).tril(2)
    got = convert(model, config)(IDS, attention_mask=banded)[0]
    lowest = torch.finfo(torch.float64).min
    both = torch.zeros(3, 4, LENGTH, LENGTH, dtype=torch.float64).masked_fill(
        ~(banded & allowed_tokens(config)), lowest
    )
    expected = model(IDS, attention_mask=both)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_a_decoder_stays_exact_with_grouped_queries_and_left_padding():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    model.set_attn_implementation("sdpa")  # eager makes rows of padding alone NaN in float64
    padding = PADDING.flip(1)  # on the left, as generation wants it
    exact = enable(copy.deepcopy(model))
    found, expected = (m(IDS, attention_mask=padding).logits for m in (exact, model))
    torch.testing.assert_close(found[padding.bool()], expected[padding.bool()], rtol=0, atol=TOLERANCE)
    with pytest.raises(UserError, match=r"LlamaForCausalLM has no self-attention of an encoder.*causal attention is"):
        enable(model, "BigBird", block=4)
    exact.config.sparse_config_cls = "BigBird"  # as a file may say
    with pytest.raises(UserError, match="LlamaAttention is causal, and its configuration names a layout"):
        exact(IDS, attention_mask=padding)


def test_bfloat16_autocast_keeps_the_bias_in_float32_and_trains_it():
    model = t5().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss, got = gradients(convert(model, "Dense"), **batch(model))
    expected_loss, expected = gradients(model, **batch(model))
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert abs(loss - expected_loss) < 0.05 and got[name].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got[name].flatten(), expected[name].flatten(), dim=0) > 0.98
