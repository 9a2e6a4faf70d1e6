"""Checkpoints of architectures that transformers saves under other names than its models have."""

import pytest
import torch
import transformers

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint.train_state import load_weights_for_all
from lm_experiments_tools.checkpoint.weights import load_weights, read_state, save_model
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.helpers.checkpoint_toys import gathered_state

SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
    num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip


def t5gemma2():
    text = {**SIZES, "layer_types": ["sliding_attention", "full_attention"]}
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    encoder = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 1}
    return transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=30, eoi_token_index=31)


def qwen3_moe():
    return transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


FAMILIES = {
    "GPTNeoXForCausalLM": lambda: transformers.GPTNeoXConfig(**SIZES),
    "Qwen3MoeForCausalLM": qwen3_moe,
    "T5Gemma2ForConditionalGeneration": t5gemma2,
    "NomicBertForMaskedLM": lambda: transformers.NomicBertConfig(**SIZES),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32),
}


def model_of(name, seed=0):
    torch.manual_seed(seed)
    model = getattr(transformers, name)(FAMILIES[name]()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def logits(model):
    ids = torch.arange(3, 13).view(2, 5)
    targets = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **targets).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_read_back_bit_for_bit_by_us_and_by_from_pretrained(name, tmp_path):
    model, other = model_of(name), model_of(name, seed=1)
    save_model(tmp_path, model)
    load_weights(other, tmp_path)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(plain), logits(model)) and torch.equal(logits(other), logits(model))
    (tmp_path / "gathered").mkdir()
    save_model(tmp_path / "gathered", other := model_of(name, seed=1), state_dict=gathered_state(model))
    load_weights(other, tmp_path / "gathered")
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    found = read_state(model_of(name, seed=2), tmp_path)  # of a model whose own weights are sharded
    torch.testing.assert_close({k: found[k] for k in model.state_dict()}, dict(model.state_dict()), rtol=0, atol=0)


def test_weights_that_a_converted_file_lacks_or_adds_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save_model(tmp_path, model_of("GPTNeoXForCausalLM"))
    weights = load_file(tmp_path / "model.safetensors")
    weights["stranger.weight"] = weights.pop("embed_out.weight")
    weights["gpt_neox.final_layer_norm.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = model_of("GPTNeoXForCausalLM", seed=1)
    with pytest.raises(UserError, match=r"1 missing \(lm_head.weight\), 1 unexpected \(stranger.weight\), 1 of "):
        load_weights(model, tmp_path)
    report = load_weights(model, tmp_path, allow_partial=True)
    assert len(report.missing) == len(report.unexpected) == len(report.mismatched) == 1


def test_a_resumed_run_is_never_loaded_in_part(tmp_path):
    """The flag is for the weights that a run begins from: a new output layer would go unnoticed."""
    save_model(tmp_path, model_of("GPT2LMHeadModel"))
    args, model = TrainerArgs(allow_partial_checkpoint=True, iters=1), model_of("GPT2LMHeadModel", seed=1)
    model.transformer.h[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="does not fit") as refusal:
        load_weights_for_all(model, tmp_path, args, LocalBackend(), resumes=True)
    assert "--allow_partial_checkpoint" not in str(refusal.value)
    report = load_weights_for_all(model, tmp_path, args, LocalBackend(), resumes=False)
    assert len(report.missing) == 2
