"""Attention maps equal the model's attention weights; pictures show the layouts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import modeling_t5
from lm_experiments_tools.attention.huggingface import enable
from lm_experiments_tools.attention.layouts import get_sparsity_config
from lm_experiments_tools.tools.attention import numbers
from lm_experiments_tools.tools.main import main
from tests.helpers.runs import words

WORDS = "a cat sat on the mat and a dog ran </script> $x$".split()
TEXT = " ".join(WORDS)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<pad>", "</s>", "<unk>", *WORDS]))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    return model


def arrays_of(folder, *parts, **flags):
    """Arrays that the command writes for a model and its tokenizer."""
    for part in parts:
        part.save_pretrained(folder)
    flags = {"model": folder, "text": TEXT, "output": folder / "deep" / "maps.npz"} | flags
    assert main(["attention", *words(**flags)]) == 0
    return np.load(flags["output"])


def test_maps_are_the_weights_of_every_attention(t5, tokenizer, tmp_path):
    arrays = arrays_of(tmp_path, t5, tokenizer, target="the dog sat", layers=1, heads="0,3")
    read, written = [*WORDS, "</s>"], ["<pad>", "the", "dog", "sat"]
    tokens = {"encoder": (read, read), "decoder": (written, written), "cross": (written, read)}
    inputs = tokenizer(TEXT, return_tensors="pt")
    labels = tokenizer("the dog sat", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = t5(**inputs, labels=labels, output_attentions=True)
    assert len(arrays) == 3 * 4
    for kind, (queries, keys) in tokens.items():
        assert (list(arrays[f"{kind}_queries"]), list(arrays[f"{kind}_keys"])) == (queries, keys)
        for head in (0, 3):
            weights = arrays[f"{kind}_layer_1_head_{head}"]
            np.testing.assert_allclose(weights, expected[f"{kind}_attentions"][1][0, head].numpy(), atol=1e-6)
            np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)


def test_maps_of_merged_attention_name_own_tokens_and_those_of_the_encoder(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = modeling_t5.T5ForConditionalGeneration(
        modeling_t5.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
            position_embedding_type="rotary", decoder_self_attention_layer="modeling_t5:T5MergedAttention",
        )
    ).eval()  # fmt: skip
    arrays = arrays_of(tmp_path, model, tokenizer, target="the dog sat")
    written = ["<pad>", "the", "dog", "sat"]
    assert list(arrays["decoder_keys"]) == [*written, *WORDS, "</s>"] and list(arrays["decoder_queries"]) == written
    weights = arrays["decoder_layer_0_head_0"]
    assert weights.shape == (4, len(arrays["decoder_keys"])) and not any("cross" in name for name in arrays)
    assert (weights[:, :4] == np.tril(weights[:, :4])).all() and (weights[:, 4:] > 0).all()


def test_without_a_target_the_model_writes_one(t5, tokenizer, tmp_path):
    arrays = arrays_of(tmp_path, t5, tokenizer)
    written = t5.generate(**tokenizer(TEXT, return_tensors="pt"), max_new_tokens=32)[0, :-1]
    assert list(arrays["decoder_queries"]) == list(map(str, tokenizer.convert_ids_to_tokens(written)))


def test_maps_of_a_sparse_model_show_its_layout(tokenizer, tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    layout = get_sparsity_config("LocalSlidingWindow", 2, block=4)
    arrays = arrays_of(tmp_path, enable(BertModel(config), layout), tokenizer)
    allowed = layout.make_layout(16)[0].repeat_interleave(4, 0).repeat_interleave(4, 1)[:13, :13].bool().numpy()
    for layer, head in product((0, 1), (0, 1)):
        weights = arrays[f"self_layer_{layer}_head_{head}"]
        assert (weights[allowed] > 0).all() and (weights[~allowed] == 0).all()


def test_the_command_writes_arrays_and_pictures_of_a_run(t5, tokenizer, tmp_path, capsys):
    """A run's folder has its last checkpoint under `last`, and the run's settings in its own config.json."""
    for part in (t5, tokenizer):
        part.save_pretrained(tmp_path / "run" / "last")
    (tmp_path / "run" / "last" / "trainer_state.safetensors").touch()  # by which a checkpoint of ours is known
    (tmp_path / "run" / "config.json").write_text('{"iters": 3}')
    command = ["attention", "--model", str(tmp_path / "run"), "--text", TEXT, "--target", "the dog sat"]
    assert main([*command, "--output", str(tmp_path / "m.npz"), "--layers", "0-1", "--heads", "0,2"]) == 0
    assert sum("_layer_" in name for name in np.load(tmp_path / "m.npz")) == 3 * 2 * 2
    assert main([*command, "--output", str(tmp_path / "m.png"), "--layers", "0", "--heads", "0"]) == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*command, "--output", "m.png", "--layers", "2"]) == 2
    assert "error: --layers: there is no layer 2, the model has 0 to 1.\n" in capsys.readouterr().err


MAPS, LAYOUT = ["--model", "a", "--text", "a"], ["--layout", "BigBird", "--output", "x.png"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--model"),
        (["--model", "a", "--layout", "BigBird"], "--layout"),
        (["--model", "a"], "--text"),
        ([*LAYOUT, "--text", "a"], "--text"),
        ([*LAYOUT, "--settings", "[1]"], "--settings '[1]'"),
        ([*MAPS, "--settings", '{"seed": 1}'], "--settings"),
        ([*MAPS, "--layers", "5-3"], "--layers 5-3"),
        ([*MAPS, "--heads", "first"], "--heads first"),
        ([*LAYOUT, "--layout", "BigBrid"], "did you mean BigBirdSparsityConfig"),
        ([*LAYOUT, "--length", "100"], "length of 100 is not a positive multiple of block=64"),
        ([*LAYOUT, "--output", "x.svg"], "--output x.svg"),
        (["--model", "/nowhere/at/all", "--text", "a"], "--model /nowhere/at/all"),
    ],
)
def test_mistakes_are_error_messages(argv, named, capsys):
    assert main(["attention", "--output", "x.npz", *argv]) == 2
    error = capsys.readouterr().err
    assert named in error and "Traceback" not in error


TINY_BERT = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8,
)  # fmt: skip
TINY_BART = BartConfig(
    vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "config", "flag", "flags"),
    [
        (BertModel, TINY_BERT, "text", {}),
        (BartForConditionalGeneration, TINY_BART, "target", {"text": "a cat sat"}),
    ],
)
def test_a_text_beyond_the_positions_of_a_model_is_refused(tokenizer, tmp_path, capsys, cls, config, flag, flags):
    for part in (cls(config), tokenizer):
        part.save_pretrained(tmp_path)
    flags = {"model": tmp_path, "output": tmp_path / "m.npz", **flags}
    capsys.readouterr()
    assert main(["attention", *words(**flags, **{flag: TEXT})]) == 2
    assert f"--{flag} of 13 tokens is more than the 8 positions of the model" in capsys.readouterr().err
    assert main(["attention", *words(**flags, **{flag: "a cat sat"})]) == 0


def test_numbers_of_layers_and_heads():
    assert numbers("all", "layers") is None
    assert numbers("0, 3-5", "layers") == [0, 3, 4, 5]


def test_layouts_are_drawn(tmp_path):
    argv = ["attention", "--layout", "BigBird,Dense", "--length", "512", "--output", str(tmp_path / "l.png")]
    assert main(argv) == 0
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
