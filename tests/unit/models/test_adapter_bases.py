"""The base of an adapter: the weights it was trained on, as long as it lives, or a sentence."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from lm_experiments_tools import FineTuner
from lm_experiments_tools.checkpoint.source import Source
from lm_experiments_tools.checkpoint.weights import save_model
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.models.saved import merged
from lm_experiments_tools.models.tokenizers import load_tokenizer
from run_finetuning import main
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.pretrained_toys import save_toy, toy_args, toy_batch, toy_model

pytest.importorskip("peft")
SETTINGS = ["--input_seq_len", "32", "--target_seq_len", "16", "--batch_size", "4"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter_bases")
    write_json(folder / "train.jsonl", pairs(16))
    save_toy("encoder-decoder", folder / "t5")
    return folder


def start(bases, base, run, iters, *flags):
    words = ["--from_pretrained", base, "--data_path", bases / "train.jsonl", "--model_path", run, "--iters", iters]
    main([*map(str, [*words, *flags]), *SETTINGS])


def weights(run):
    return load_file(run / "last" / "adapter_model.safetensors")


@pytest.mark.slow
def test_an_adapter_goes_on_over_the_weights_it_began_with(bases, tmp_path):
    """Its base, the last checkpoint of a run, is kept by that run, which trains on with room for one checkpoint."""
    base, run, lora = tmp_path / "base", tmp_path / "adapter", ("--peft", "lora", "--lora_dropout", 0.1)
    pretraining = (bases / "t5", base)
    start(bases, *pretraining, 2, "--lr", 1e-2, "--keep_checkpoints", 1)
    start(bases, base, run, 2, *lora)
    start(bases, *pretraining, 6, "--lr", 1e-2, "--keep_checkpoints", 1, "--save_interval", 2)
    steps = sorted(path.name for path in (base / "checkpoints").glob("step_*"))
    assert steps == ["step_000002", "step_000006"]
    with pytest.raises(UserError, match=r"the weights of .*step_000006 are not those .*continue by") as refusal:
        start(bases, base, run, 4, *lora)
    flags = re.search(r"(--from_pretrained) (\S+) (--resume) (\S+),", str(refusal.value)).groups()
    start(bases, flags[1], run, 4, *lora, *flags[2:])
    start(bases, base / "checkpoints" / "step_000002", tmp_path / "whole", 4, *lora)
    ours, theirs = weights(run), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())

    copy = shutil.copytree(run / "last", tmp_path / "copy")
    lengths = {"input_seq_len": 32, "target_seq_len": 16}
    text = FineTuner(copy, **lengths).generate_single("w1 w2 w3")
    moved = (base / "checkpoints" / "step_000002").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"is gone: .*its run has pruned.*base_model_name_or_path"):
        FineTuner(copy, **lengths)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(moved)}))
    assert FineTuner(copy, **lengths).generate_single("w1 w2 w3") == text


@pytest.mark.parametrize("flags", [{"peft": "lora"}, {"peft": "prompt_tuning"}], ids=str)
def test_an_adapter_is_not_put_on_weights_that_have_changed(flags, tmp_path):
    base, folder = save_toy("decoder", tmp_path / "base"), tmp_path / "adapter"
    args = toy_args(base, "decoder", **flags)
    tokenizer = load_tokenizer(args)
    folder.mkdir()
    save_model(folder, pretrained_model(args, tokenizer))
    tokenizer.save_pretrained(folder)
    saved = toy_args(folder, "decoder")
    pretrained_model(saved, tokenizer)
    torch.manual_seed(1)
    changed = toy_model("decoder")
    torch.nn.init.normal_(changed.transformer.h[0].mlp.c_fc.bias)
    save_toy("decoder", base, changed)
    with pytest.raises(UserError, match=r"the weights of .*base are not those that the adapter"):
        pretrained_model(saved, tokenizer)
    if flags["peft"] == "lora":
        with pytest.raises(UserError, match="are not those that the adapter"):
            merged(Source(str(folder), folder, is_adapter=True))
    for file in folder.rglob("adapter_model.safetensors"):  # as adapters were before
        save_file(load_file(file), file, metadata={"format": "pt"})
    assert pretrained_model(saved, tokenizer)(**toy_batch("decoder")).loss.isfinite()


def test_a_model_of_the_hub_is_known_by_its_file_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    save_toy("decoder", repository / "snapshots" / "abc")
    there = hashlib.sha256((repository / "snapshots" / "abc" / "model.safetensors").read_bytes()).hexdigest()
    assert (Source("someone/tiny").fingerprint(), Source("someone/other").fingerprint()) == (there, None)
