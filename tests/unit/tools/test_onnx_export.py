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

from lm_experiments_tools.checkpoint.writer import save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.onnx_export import OnnxModel, _decode, _encode, export
from tests.helpers.pretrained_toys import save_toy, t5_config, toy_args, toy_batch, toy_model, toy_tokenizer

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
def test_classifier_through_the_command(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=96)
    model = BertForSequenceClassification(BertConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "model.onnx"
    assert main(["export", "--from_pretrained", str(tmp_path / "model"), "--output", str(out)]) == 0
    assert "differs from torch by at most" in capsys.readouterr().out
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
    assert set(export(model, tmp_path)) == {"encoder.onnx", "decoder.onnx"}
    batch = toy_batch("encoder-decoder")
    ask = {name: batch[name] for name in ("input_ids", "attention_mask")}
    torch_text = model.generate(**ask, max_new_tokens=9)
    assert len({tuple(row) for row in torch_text.tolist()}) > 1
    assert torch.equal(OnnxModel(tmp_path).generate(**ask, max_new_tokens=9), torch_text)


@pytest.mark.parametrize("make", [tiny_t5, tiny_bart])
def test_all_settings_of_generation_count(make, tmp_path, monkeypatch):
    """With torch in the place of the graphs, which are compared with it elsewhere."""
    model = make()
    sessions = {"encoder.onnx": _encode, "decoder.onnx": _decode}

    def session(file):
        return lambda *arrays: sessions[file.name](model, *map(torch.from_numpy, arrays)).detach().numpy()

    for name in sessions:
        (tmp_path / name).touch()
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    monkeypatch.setattr("lm_experiments_tools.tools.onnx_export._Session", session)
    batch = toy_batch("encoder-decoder")
    ask = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 9}
    plain = model.generate(**ask)
    assert torch.equal(OnnxModel(tmp_path).generate(**ask), plain)
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
    assert "is no fine-tuned BertForSequenceClassification: 2 of its weights" in capsys.readouterr().err
    with pytest.raises(UserError, match="has neither model.onnx nor encoder.onnx and decoder.onnx"):
        OnnxModel(tmp_path / "encoder")


def test_a_lora_adapter_is_merged(tmp_path):
    from lm_experiments_tools.checkpoint.source import find_source
    from lm_experiments_tools.models.pretrained import whole_model

    base = save_toy("encoder", tmp_path / "base")
    model = pretrained_model(toy_args(base, "encoder", peft="lora"), toy_tokenizer(), ("no", "so", "yes")).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    (tmp_path / "adapter").mkdir()
    save_model(tmp_path / "adapter", model)
    batch = toy_batch("encoder")
    merged = whole_model(find_source(str(tmp_path / "adapter"))).eval()
    assert merged.config.id2label == {0: "no", 1: "so", 2: "yes"}
    assert not hasattr(merged, "peft_config") or not any("lora" in n for n, _ in merged.named_parameters())
    torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-4)
