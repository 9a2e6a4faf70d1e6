"""ONNX graphs compute what the model does, in other sizes than they were traced in; text is torch's text."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    T5ForConditionalGeneration,
)

import modeling_bert
import modeling_t5
from lm_experiments_tools.checkpoint.weights import save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.onnx_export import OnnxModel, _decode, _decode_later, _encode, export
from tests.helpers.pretrained_toys import save_toy, t5_config, toy_args, toy_batch, toy_model, toy_tokenizer

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
def test_classifier_through_the_command(tmp_path, capsys, recwarn):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=96)
    model = BertForSequenceClassification(BertConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "model.onnx"
    assert main(["export", "--from_pretrained", str(tmp_path / "model"), "--output", str(out)]) == 0
    assert "differs from torch by at most" in capsys.readouterr().out
    assert not [warning for warning in recwarn if "treespec" in str(warning.message)]  # torch's of itself
    assert (out / "tokenizer.json").is_file()
    batch = toy_batch("encoder", rows=5)
    del batch["labels"]
    alone = OnnxModel(out).logits(**batch)
    torch.testing.assert_close(alone, model(**batch).logits.detach(), atol=1e-5, rtol=1e-4)
    batch["token_type_ids"] = (torch.arange(8) > 3).long().expand(5, 8).contiguous()  # of two sentences
    pairs = OnnxModel(out).logits(**batch)
    torch.testing.assert_close(pairs, model(**batch).logits.detach(), atol=1e-5, rtol=1e-4)
    assert (pairs - alone).abs().max() > 1e-4


def tiny_bart():
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.4)
    sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64, vocab_size=96)
    ids = dict(pad_token_id=0, bos_token_id=2, eos_token_id=1, decoder_start_token_id=1)
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**sizes, **ids)).eval()
    vars(model.generation_config).update(forced_bos_token_id=2, forced_eos_token_id=1, no_repeat_ngram_size=3)
    return model


def tiny_t5():
    config = t5_config(num_layers=1)
    config.tie_word_embeddings = False  # with a tied output layer random weights repeat their input
    return build_model(T5ForConditionalGeneration, config, seed=0).eval()


@pytest.mark.slow
def test_encoder_decoder_writes_what_torch_writes(tmp_path):
    model = tiny_t5()
    assert set(export(model, tmp_path)) == GRAPHS.keys()
    batch = toy_batch("encoder-decoder")
    ask = {name: batch[name] for name in ("input_ids", "attention_mask")}
    torch_text = model.generate(**ask, max_new_tokens=9)
    assert len({tuple(row) for row in torch_text.tolist()}) > 1
    loaded = OnnxModel(tmp_path)
    assert torch.equal(loaded.generate(**ask, max_new_tokens=9), torch_text)
    beams = {"num_beams": 3, "max_new_tokens": 9, "length_penalty": 2.0}
    assert torch.equal(loaded.generate(**ask, **beams), model.generate(**ask, **beams))


GRAPHS = {
    "encoder_model.onnx": _encode, "decoder_model.onnx": _decode, "decoder_with_past_model.onnx": _decode_later,
}  # fmt: skip


def our_t5(**changed):
    values = {**t5_config(num_layers=1).to_diff_dict(), "num_memory_tokens": 2, "tie_word_embeddings": False}
    config = modeling_t5.T5Config(**{**values, **changed})
    return build_model(modeling_t5.T5ForConditionalGeneration, config, seed=0).eval()


@pytest.mark.parametrize("make", [tiny_t5, tiny_bart, our_t5])
def test_all_settings_of_generation_count(make, tmp_path, monkeypatch):
    """With torch in the place of the graphs, which are compared with it elsewhere."""
    model, lengths = make(), []

    def session(file):
        def run(*arrays):
            lengths.append(arrays[0].shape[1])
            return [t.detach().numpy() for t in GRAPHS[file.name](model, *map(torch.from_numpy, arrays))]

        return run

    for name in GRAPHS:
        (tmp_path / name).touch()
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    monkeypatch.setattr("lm_experiments_tools.tools.onnx_export._Session", session)
    batch = toy_batch("encoder-decoder")
    ask = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 9}
    plain = model.generate(**ask)
    assert torch.equal(OnnxModel(tmp_path).generate(**ask), plain)
    assert max(lengths[1:]) == 1
    for options in (
        {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
        {"min_new_tokens": 4, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "suppress_tokens": [7, 9]},
        {"do_sample": True, "top_k": 20},
    ):
        torch.manual_seed(5)
        expected = model.generate(**ask, **options)
        torch.manual_seed(5)
        assert torch.equal(OnnxModel(tmp_path).generate(**ask, **options), expected)
        assert expected.tolist() != plain.tolist()


def test_decoders_and_what_is_not_fine_tuned_are_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="GPT2LMHeadModel is a decoder, which is not exported"):
        export(toy_model("decoder"), tmp_path)
    save_toy("encoder", tmp_path / "encoder")
    assert main(["export", "--from_pretrained", str(tmp_path / "encoder"), "--output", str(tmp_path / "out")]) == 2
    assert "BertForPreTraining is no classifier" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds no ONNX files"):
        OnnxModel(tmp_path / "encoder")


SPARSE = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 4}}
BERT = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
T5_VARIANTS = {
    "": {},
    "rotary": {"position_embedding_type": "rotary"},
    "alibi": {"position_embedding_type": "alibi"},
    "none": {"position_embedding_type": "none"},
    "bias per layer": {"relative_attention_bias_per_layer": True},
    "memory": {"num_memory_tokens": 2},
    "cdQ": {"encoder_self_attention_layer": "modeling_t5:T5CDQAttention", "num_cdq_heads": 2},
    "fewer decoder layers": {"num_layers": 2, "num_decoder_layers": 1},
}
BERT_VARIANTS = {
    "": {},
    **{name: {"position_embedding_type": name} for name in ("rotary", "alibi", "relative_attention_bias", "none")},
    "relative_key": {"position_embedding_type": "relative_key"},
    "pre-norm": {"pre_layer_norm": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", T5_VARIANTS)
def test_every_t5_writes_what_torch_writes(variant, tmp_path):
    model = our_t5(**{"num_memory_tokens": 0, **T5_VARIANTS[variant]})
    assert set(export(model, tmp_path)) == GRAPHS.keys()
    batch, loaded = toy_batch("encoder-decoder"), OnnxModel(tmp_path)
    ask = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 9}
    for options in ({}, {"num_beams": 3, "length_penalty": 2.0}):
        assert torch.equal(loaded.generate(**ask, **options), model.generate(**ask, **options))


@pytest.mark.slow
@pytest.mark.parametrize("variant", BERT_VARIANTS)
def test_every_bert_is_exported(variant, tmp_path):
    """Which compares it with torch."""
    config = modeling_bert.BertConfig(**BERT, **BERT_VARIANTS[variant])
    model = build_model(modeling_bert.BertForSequenceClassification, config, seed=0)
    assert export(model, tmp_path)["model.onnx"] < 1e-5


@pytest.mark.slow
def test_memory_tokens_leave_the_number_of_rows_free():
    """What a graph needs, without the minute of writing one."""
    encoder = our_t5().encoder
    ids, free = torch.ones(2, 5, dtype=torch.long), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(encoder, (ids, torch.ones_like(ids)), dynamic_shapes=(free, free)).module()
    more = torch.ones(3, 9, dtype=torch.long)
    found = program(more, torch.ones_like(more)).last_hidden_state
    torch.testing.assert_close(found, encoder(more, torch.ones_like(more)).last_hidden_state)


def test_a_model_with_alibi_computes_on_after_an_export():
    """Whose slopes are kept for all calls, unless they are those of a trace."""
    config = modeling_bert.BertConfig(**{**BERT, "num_attention_heads": 8}, position_embedding_type="alibi")
    model = build_model(modeling_bert.BertModel, config, seed=0).eval()
    model.set_attn_implementation("eager")
    ids = torch.ones(2, 5, dtype=torch.long)
    program = torch.export.export(model, (ids,))
    expected = program.module()(ids).last_hidden_state
    torch.testing.assert_close(model(ids).last_hidden_state.detach(), expected.detach())


def test_block_sparse_attention_is_refused(tmp_path):
    ours = modeling_bert.BertForSequenceClassification(modeling_bert.BertConfig(**BERT, **SPARSE))
    with pytest.raises(UserError, match="sparse_config_cls"):
        export(ours, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_lora_adapter_is_merged(tmp_path):
    from lm_experiments_tools.checkpoint.source import find_source
    from lm_experiments_tools.models.saved import merged

    base = save_toy("encoder", tmp_path / "base")
    model = pretrained_model(toy_args(base, "encoder", peft="lora"), toy_tokenizer(), ("no", "so", "yes")).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    (tmp_path / "adapter").mkdir()
    save_model(tmp_path / "adapter", model)
    batch = toy_batch("encoder")
    merged = merged(find_source(str(tmp_path / "adapter"))).eval()
    assert merged.config.id2label == {0: "no", 1: "so", 2: "yes"}
    assert not hasattr(merged, "peft_config") or not any("lora" in n for n, _ in merged.named_parameters())
    torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-4)
