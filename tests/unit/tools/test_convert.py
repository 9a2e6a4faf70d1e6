"""`lmtools convert`: weights of other programs, to the logits of the model that they were written from."""

import json

import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration, T5GemmaForConditionalGeneration

import modeling_t5
from lm_experiments_tools.tools.main import main
from tests.helpers.runs import TINY
from tests.helpers.t5x_toys import write_t5x
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


def source_model(gated: bool = False) -> T5ForConditionalGeneration:
    """transformers' own; v1.1 is gated, with an output layer of its own."""
    torch.manual_seed(3)
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if gated else {}
    sizes = {name: size for name, size in TINY.items() if name != "base"} | {"num_layers": 2, "num_decoder_layers": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, **kind, pad_token_id=0, decoder_start_token_id=0)).eval()
    if gated:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared  # as t5x, which has one embedding
    return model


def configuration(folder, gated: bool = False) -> str:
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if gated else {}
    settings = {**TINY, "num_layers": 2, "num_decoder_layers": 2, **kind}
    (folder / "tiny.json").write_text(json.dumps(settings))
    return str(folder / "tiny.json")


def logits(model) -> torch.Tensor:
    ids = torch.arange(3, 23).reshape(2, 10)
    with torch.no_grad():
        return model.eval()(input_ids=ids, decoder_input_ids=ids[:, :4]).logits


@pytest.mark.parametrize("program", ["t5-experiments", "nanoT5"])
def test_files_of_the_ancestors(tmp_path, program):
    model, weights = source_model(), source_model().state_dict()
    file = tmp_path / ("model_9.pth" if program == "t5-experiments" else "pytorch_model.bin")
    content = {"model_state_dict": weights, "iteration": 9, "epoch": 0} if program == "t5-experiments" else weights
    torch.save(content, file)
    vocab = str(numbered_words_vocabulary(tmp_path))
    command = ["convert", str(file), "--to", str(tmp_path / "out"), "--model_cfg", configuration(tmp_path)]
    assert main([*command, "--tokenizer", vocab, "--max_shard_size", "60KB"]) == 0
    again = T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("word1")["input_ids"]


@pytest.mark.parametrize(("gated", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_arrays_of_t5x(tmp_path, gated, dtype):
    model = source_model(gated)
    write_t5x(model, tmp_path / "checkpoint", dtype)
    model = model.to(getattr(torch, dtype)).float()
    (tmp_path / "checkpoint" / "checkpoint").write_bytes(b"msgpack")
    command = ["convert", str(tmp_path / "checkpoint"), "--to", str(tmp_path / "out"), "--model_cfg"]
    assert main([*command, configuration(tmp_path, gated)]) == 0
    torch.testing.assert_close(logits(T5ForConditionalGeneration.from_pretrained(tmp_path / "out")), logits(model))


def test_what_is_damaged_or_of_another_model_is_a_sentence(tmp_path, capsys):
    write_t5x(source_model(), tmp_path / "checkpoint")
    arrays = tmp_path / "checkpoint"
    command = ["convert", str(arrays), "--to", str(tmp_path / "out"), "--model_cfg"]
    assert main([*command, configuration(tmp_path, gated=True)]) == 2
    assert "does not fit the model" in capsys.readouterr().err
    config = configuration(tmp_path)
    chunk = arrays / "target.encoder.encoder_norm.scale" / "0"
    content = chunk.read_bytes()
    for damaged in (content[:-9], b"garbage"):
        chunk.write_bytes(damaged)
        assert main([*command, config]) == 2
        assert f"{chunk} is damaged" in capsys.readouterr().err
    chunk.unlink()
    assert main([*command, config]) == 2 and "0 is damaged" in capsys.readouterr().err
    chunk.write_bytes(content)
    (arrays / "target.encoder.encoder_norm.scale").rename(arrays / "target.encoder.visual.scale")
    assert main([*command, config]) == 2 and "a T5 has no such weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_a_t5_becomes_a_t5gemma_and_again_a_t5(tmp_path, capsys):
    torch.manual_seed(0)
    gemma = {"post_norms": True, "scale_embeddings": True, "separate_encoder_embeddings": True, "num_layers": 2}
    gemma |= {"position_embedding_type": "rotary", "feed_forward_proj": "gated-gelu_pytorch_tanh"}
    sizes = {name: value for name, value in TINY.items() if name != "base"}
    ours = modeling_t5.T5ForConditionalGeneration(modeling_t5.T5Config(**sizes | gemma)).eval()
    ours.config.scale_decoder_outputs = False
    source, theirs, back = (str(tmp_path / name) for name in ("ours", "theirs", "back"))
    ours.save_pretrained(source)
    assert main(["convert", source, "--to", theirs, "--model_type", "t5gemma"]) == 0
    torch.testing.assert_close(logits(T5GemmaForConditionalGeneration.from_pretrained(theirs)), logits(ours))
    assert main(["convert", theirs, "--to", back]) == 0
    torch.testing.assert_close(logits(modeling_t5.T5ForConditionalGeneration.from_pretrained(back)), logits(ours))
    assert main(["convert", theirs, "--to", "x", "--model_cls", "modeling_bert:BertModel"]) == 2
    assert "--model_cfg is required" in capsys.readouterr().err
