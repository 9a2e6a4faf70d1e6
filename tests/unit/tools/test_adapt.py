"""`lmtools adapt`: folders that transformers reads, with the source's tokenizer; refusals name flag and fix."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    T5GemmaForConditionalGeneration,
)

from lm_experiments_tools.models.adapted import adapted_encoder, adapted_encoder_decoder
from lm_experiments_tools.tools.main import main
from modeling_t5 import T5Config, T5ForConditionalGeneration
from run_bert_pretraining import main as pretrain
from tests.helpers.decoder_toys import toy_decoder, toy_ids
from tests.helpers.runs import records, words
from tests.helpers.token_toys import write_jsonl
from tests.helpers.tokenizer_toys import byte_fallback_tokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    """A Gemma 2 in bf16, in several files, with a tokenizer without a mask token."""
    folder = tmp_path_factory.mktemp("gemma")
    toy_decoder("gemma2").to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return byte_fallback_tokenizer(folder)


def test_a_sharded_source_becomes_a_t5gemma_in_its_dtype_with_its_tokenizer(gemma, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["adapt", str(gemma), "--to", "encoder-decoder", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "T5GemmaForConditionalGeneration" in printed
    assert f'AutoModelForSeq2SeqLM.from_pretrained("{out}")' in printed

    model = T5GemmaForConditionalGeneration.from_pretrained(out).eval()
    expected = adapted_encoder_decoder(toy_decoder("gemma2").to(torch.bfloat16), seed=0)
    assert model.dtype == torch.bfloat16
    for name, weight in expected.state_dict().items():
        assert torch.equal(model.get_parameter(name), weight), name
    assert (
        AutoTokenizer.from_pretrained(out)("word1 counts")["input_ids"]
        == (AutoTokenizer.from_pretrained(gemma)("word1 counts")["input_ids"])
    )
    assert model.generation_config.decoder_start_token_id == 2


def test_new_weights_fit_in_the_dtype_of_the_source_also_from_the_hubs_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--gemma"
    source = repository / "snapshots" / "abc"
    toy_decoder("gemma3_text").to(torch.bfloat16).save_pretrained(source)
    byte_fallback_tokenizer(source)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert main(["adapt", "someone/gemma", "--to", "encoder-decoder", "--out", str(tmp_path / "out")]) == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_model_cls_makes_a_t5_of_this_package_and_convert_goes_back_and_forth(kind, tmp_path) -> None:
    source, names = byte_fallback_tokenizer(tmp_path / "source"), ["ours", "theirs", "again"]
    toy_decoder(kind).float().save_pretrained(source)
    ours, theirs, again = (str(tmp_path / name) for name in names)
    flags = ["--to", "encoder-decoder", "--model_cls", "modeling_t5:T5ForConditionalGeneration", "--out", ours]
    assert main(["adapt", str(source), *flags]) == 0
    assert main(["convert", ours, "--to", theirs, "--model_type", "t5gemma"]) == 0
    assert main(["convert", theirs, "--to", again]) == 0

    inputs = {"input_ids": toy_ids(11), "decoder_input_ids": toy_ids(7, seed=1)}
    expected = adapted_encoder_decoder(toy_decoder(kind).float(), seed=0)
    for folder in (ours, theirs, again):
        model = model_of(folder)
        assert type(model) is (type(expected) if folder == theirs else T5ForConditionalGeneration)
        torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert model_of(again).config.decoder_start_token_id == 2


def model_of(folder: str) -> PreTrainedModel:
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def test_another_t5_is_not_written_as_a_t5gemma(tmp_path, capsys) -> None:
    sizes = {"vocab_size": 9, "d_model": 4, "d_kv": 2, "d_ff": 4, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    assert main(["convert", str(tmp_path / "t5"), "--to", str(tmp_path / "out"), "--model_type", "t5gemma"]) == 2
    assert "This T5 cannot be written as T5Gemma: " in capsys.readouterr().err


def test_an_encoder_is_loaded_by_auto_classes_and_its_tokenizer_knows_the_mask(gemma, tmp_path) -> None:
    out = tmp_path / "out"
    assert main(["adapt", str(gemma), "--to", "encoder", "--mask_token", "<unused3>", "--out", str(out)]) == 0
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(out).float().eval(), AutoTokenizer.from_pretrained(out)
    assert tokenizer.mask_token == "<unused3>"
    expected = adapted_encoder(toy_decoder("gemma2").to(torch.bfloat16), tokenizer.mask_token_id, 0).float()
    assert torch.equal(model(toy_ids(9)).logits, expected(toy_ids(9)).logits)


@pytest.mark.slow
def test_a_llama_becomes_a_eurobert_that_a_process_without_this_package_loads(tmp_path) -> None:
    source, out = tmp_path / "llama", tmp_path / "out"
    toy_decoder("llama").save_pretrained(source)
    byte_fallback_tokenizer(source)
    assert main(["adapt", str(source), "--to", "encoder", "--mask_token", "<unused0>", "--out", str(out)]) == 0
    code = "import sys, transformers as t; m = t.AutoModelForMaskedLM.from_pretrained(sys.argv[1]); "
    code += (
        "print(type(m).__name__, m.config.mask_token_id, t.AutoTokenizer.from_pretrained(sys.argv[1]).mask_token_id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["EuroBertForMaskedLM", "4", "4"]


@pytest.mark.parametrize(
    ("kind", "packing"), [("gemma2", "none"), pytest.param("llama", "documents", marks=pytest.mark.slow)]
)
def test_an_adapted_encoder_is_trained_from_its_own_weights(kind, packing, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy_decoder(kind).float().save_pretrained("source")
    byte_fallback_tokenizer(tmp_path / "source")
    assert main(["adapt", "source", "--to", "encoder", "--mask_token", "<unused0>", "--out", "out"]) == 0
    write_jsonl(tmp_path / "text.jsonl", ["word1 counts word2 " * 4] * 40)
    flags = {"from_pretrained": "out", "data_path": "text.jsonl", "packing": packing, "input_seq_len": 32}
    flags |= {"model_path": "run", "mlm_prob": 0.3, "batch_size": 8, "lr": 1e-2, "iters": 30, "log_interval": 1}
    pretrain(words(**flags, backend="local", speed="off", data_n_workers=1, save_interval=1, keep_checkpoints=40))
    source, first, last = (
        AutoModelForMaskedLM.from_pretrained(folder).state_dict()
        for folder in ("out", "run/checkpoints/step_000001", "run/last")
    )
    # Adam's first step is at most the rate, of each weight
    assert all((first[name] - source[name]).abs().max() <= 1.01e-2 for name in source)
    assert all(not torch.equal(last[name], source[name]) for name in source if name.endswith("proj.weight"))
    losses = [line["loss"] for line in records("run")]
    assert losses[0] > 5 and losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "encoder"], "it has no mask token: name by --mask_token a token of it, for example <unused0>, "),
        (["--to", "encoder", "--mask_token", "<mask>"], "--mask_token <mask> is not in it"),
        (["--to", "encoder", "--encoder", "other"], "--encoder is not read by --to encoder"),
        (["--to", "encoder-decoder", "--mask_token", "<unused0>"], "--mask_token is not read by --to encoder-decoder"),
        ([], "name decoder, kind and folder"),
    ],
)
def test_refusals_name_the_flag_and_leave_nothing(gemma, tmp_path, capsys, flags, message) -> None:
    assert main(["adapt", str(gemma), "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_folder_with_files_is_refused(gemma, tmp_path, capsys) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["adapt", str(gemma), "--to", "encoder-decoder", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} exists" in capsys.readouterr().err
