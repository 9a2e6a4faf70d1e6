"""Rounding of the fused path under autocast to bfloat16, next to that of transformers' models."""

import copy

import pytest
import torch
import transformers

import modeling_bert
import modeling_t5

T5 = {"vocab_size": 500, "d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 256, "num_layers": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip
BERT = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512,
        "num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
FAMILIES = {
    "t5": (modeling_t5.T5ForConditionalGeneration, transformers.T5ForConditionalGeneration,
           transformers.T5Config, T5),
    "t5 1.1": (modeling_t5.T5ForConditionalGeneration, transformers.T5ForConditionalGeneration,
               transformers.T5Config, {**T5, "feed_forward_proj": "gated-gelu"}),
    "bert": (modeling_bert.BertForMaskedLM, transformers.BertForMaskedLM, transformers.BertConfig, BERT),
}  # fmt: skip


def gradient(model, ids, labels, enabled: bool) -> torch.Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        model(input_ids=ids, labels=labels).loss.backward()
    return torch.cat([p.grad.double().flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_path_rounds_gradients_at_most_twice_as_much_as_transformers(family):
    """Distances of the whole gradient from float64's; the residual stream is bfloat16 in ours, float32 in theirs."""
    ours, theirs, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    reference = theirs(config(**sizes))
    fused = ours(ours.config_class(**sizes))
    fused.load_state_dict(reference.state_dict())
    fused.use_fast_step()
    ids = torch.randint(2, 500, (4, 32))
    exact = gradient(copy.deepcopy(reference).double(), ids, ids, False)
    errors = [((gradient(m, ids, ids, True) - exact).norm() / exact.norm()).item() for m in (fused, reference)]
    assert 0.8 * errors[1] < errors[0] < 2 * errors[1] < 0.12
