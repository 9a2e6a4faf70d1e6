"""Embeddings with more rows than the file keep those of the file; no flag loads a model without its embeddings."""

import pytest
import torch
import transformers as tr
from safetensors.torch import load_file

import modeling_t5
from lm_experiments_tools.checkpoint.weights import load_weights
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.tokenizers import load_tokenizer
from tests.helpers.pretrained_toys import WORDS, save_toy, toy_args, toy_model, toy_tokenizer

BODY = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
T5 = dict(d_model=16, d_ff=40, d_kv=8, num_layers=1, num_heads=2)
BART = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
BART |= dict(encoder_ffn_dim=40, decoder_ffn_dim=40)
OURS = (modeling_t5.T5ForConditionalGeneration, modeling_t5.T5Config, {**T5, "tie_word_embeddings": False})
FAMILIES = {
    "bert": (tr.BertForMaskedLM, tr.BertConfig, dict(**BODY, max_position_embeddings=40)),
    "gpt2": (tr.GPT2LMHeadModel, tr.GPT2Config, dict(n_embd=16, n_layer=1, n_head=2, n_positions=40)),
    "bart": (tr.BartForConditionalGeneration, tr.BartConfig, dict(**BART, max_position_embeddings=40)),
    "t5": (tr.T5ForConditionalGeneration, tr.T5Config, T5),
    "t5 untied": OURS,
}


def made(name, seed, **changed):
    cls, config_cls, sizes = FAMILIES[name]
    torch.manual_seed(seed)
    return cls(config_cls(**{"vocab_size": 40, "pad_token_id": 0, **sizes, **changed}))


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_new_rows_are_random_and_the_others_those_of_the_file(tmp_path, name, partial):
    made(name, 0).save_pretrained(tmp_path)
    in_file, model = load_file(tmp_path / "model.safetensors"), made(name, 1, vocab_size=48)
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    report = load_weights(model, tmp_path, allow_partial=partial)
    assert report.is_complete and report.grown and "with new rows (40x16 in the file, 48x16" in str(report)
    for key, value in in_file.items():
        now = model.state_dict()[key]
        assert torch.equal(now[tuple(map(slice, value.shape))], value), key
        if now.shape != value.shape:
            rows = now.dim() - 1 if key == "final_logits_bias" else 0
            assert torch.equal(now.narrow(rows, 40, 8), fresh[key].narrow(rows, 40, 8)), key


def test_positions_grow_too_and_relative_distances_do_not(tmp_path):
    made("bert", 0).save_pretrained(tmp_path)
    old = load_file(tmp_path / "model.safetensors")["bert.embeddings.position_embeddings.weight"]
    model = made("bert", 1, max_position_embeddings=64)
    load_weights(model, tmp_path)
    assert torch.equal(model.bert.embeddings.position_embeddings.weight[:40], old)
    made("t5", 0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"relative_attention_bias.*pass --allow_partial_checkpoint"):
        load_weights(made("t5", 1, relative_attention_num_buckets=64), tmp_path)


@pytest.mark.parametrize("changed", [{"vocab_size": 32}, {"d_model": 24}])
@pytest.mark.parametrize("partial", [False, True])
def test_an_embedding_is_not_dropped_whatever_the_flag(tmp_path, changed, partial):
    made("t5", 0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"shared\.weight is never dropped: it may get more rows") as refusal:
        load_weights(made("t5", 1, **changed), tmp_path, allow_partial=partial)
    assert "--allow_partial_checkpoint" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", "decoder"])
def test_tokens_added_to_the_tokenizer_get_rows_in_fine_tuning(tmp_path, kind):
    base = toy_model(kind)
    base.resize_token_embeddings(WORDS)
    save_toy(kind, tmp_path / "base", base)
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["qqzx", "wwzx"])
    tokenizer.save_pretrained(tmp_path / "more")
    old = base.get_input_embeddings().weight
    args = toy_args(tmp_path / "base", kind, tokenizer=str(tmp_path / "more"))
    model = pretrained_model(args, load_tokenizer(args), ("no", "yes"))
    now = model.get_input_embeddings().weight
    assert now.shape[0] == model.config.vocab_size == WORDS + 2 and torch.equal(now[:WORDS], old)
    args = toy_args(tmp_path / "base", kind, tokenizer=str(tmp_path / "more"), peft="lora")
    with pytest.raises(UserError, match=r"has 92 tokens, the embedding 90 rows: .* only without --peft"):
        pretrained_model(args, load_tokenizer(args), ("no", "yes"))
