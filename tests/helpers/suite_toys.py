"""Runs of toy models with two checkpoints, and tasks for suites of other projects to measure them by."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from lm_experiments_tools.checkpoint.manifest import build_manifest, describe_files, list_files
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.files import write_atomic
from tests.helpers.pretrained_toys import ROWS, save_toy, toy_model


def model_of(kind: str, seed: int) -> torch.nn.Module:
    """Other weights for each seed, of such a size that texts do not look alike."""
    if kind == "encoder":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = BertForMaskedLM(BertConfig(vocab_size=ROWS, max_position_embeddings=512, **sizes))
    else:
        model = toy_model(kind)
    torch.manual_seed(seed)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def save_run(run: Path, kind: str) -> Path:
    """A run directory with checkpoints of steps 2 and 4."""
    for step in (2, 4):
        folder = run / "checkpoints" / f"step_{step:06}"
        save_toy(kind, folder, model_of(kind, step))
        state = {"step": step, "consumed_samples": 8 * step, "consumed_tokens": 100 * step}
        (folder / "trainer_state.json").write_text(json.dumps({"state": state}))
        entries = describe_files(folder, list_files(folder).values())
        write_atomic(folder / "manifest.json", build_manifest(entries, step, False, {}))
    for link in ("best", "last"):
        (run / link).symlink_to("checkpoints/step_000004")
    (run / "config.json").write_text(json.dumps({"iters": 4, "lr": 1e-3}))
    return run


def save_decoder_with_t5_tokenizer(folder: Path, vocab: Path, favourite: str) -> Path:
    """A GPT-2 that gives each token the same score after any text, the highest to those of `favourite`; its tokenizer
    appends </s>."""
    Tokenizer.load(vocab).save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, tie_word_embeddings=False))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.normal_(std=0.01)
        model.lm_head.weight[tokenizer(favourite)["input_ids"][:-1]] += 0.3
    model.save_pretrained(folder)
    return folder


def write_colours(folder: Path, choices: str = '["w40 w41", "w50"]', label: int | None = None) -> Path:
    """A task of lm_eval's, with a choice to be scored and a file beside; each label is `label`, or they alternate."""
    rows = [{"thing": f"w{i} w{i + 3}", "label": i % 2 if label is None else label} for i in range(16)]
    (folder / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "colours.yaml").write_text(
        f"""task: colours
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "colours.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{thing}}}} is"
doc_to_choice: {choices}
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    return folder / "colours.yaml"
