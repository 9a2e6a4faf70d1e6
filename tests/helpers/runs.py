"""Scripts started with flags given as keywords, tiny models for them, and the records that they log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_experiments_tools.errors import UserError
from tests.helpers import ROOT
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


def words(**flags: Any) -> list[str]:
    """Flags as a command line: None leaves one out, True writes its name alone, a tuple gives several values."""
    line: list[str] = []
    for name, value in flags.items():
        if value is not None:
            values = () if value is True else value if isinstance(value, tuple) else (value,)
            line += [f"--{name}", *map(str, values)]
    return line


def refused(start: Callable[..., Any], sentence: str, *args: Any, **flags: Any) -> None:
    """Check that a start raises UserError of one line that matches."""
    with pytest.raises(UserError, match=sentence) as error:
        start(*args, **flags)
    assert "\n" not in str(error.value)


def write_text(folder: Path, name: str = "text.jsonl", pairs: int = 40) -> Path:
    """Write 40 documents of so many pairs of words, which `numbered_words_vocabulary` knows."""
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(pairs))}) for i in range(40)]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def write_toys(folder: Path) -> None:
    """Write text.jsonl and the configurations tiny.json (of a T5), gpt2.json and bert.json."""
    write_text(folder)
    for name, config in (("tiny", TINY), ("gpt2", GPT2), ("bert", BERT)):
        (folder / f"{name}.json").write_text(json.dumps(config))


def tiny_run(folder: Path, model: Mapping[str, Any], **flags: Any) -> dict[str, Any]:
    """Flags of a small pre-training run, whose text, vocabulary and model configuration are written to a folder."""
    write_text(folder)
    (folder / "tiny.json").write_text(json.dumps(model))
    return {
        "data_path": folder / "text.jsonl", "vocab": numbered_words_vocabulary(folder), "batch_size": 4, "lr": 1e-3,
        "model_cfg": folder / "tiny.json", "input_seq_len": 32, "data_n_workers": 1, "log_interval": 1,
        "save_interval": 2, **flags,
    }  # fmt: skip


def tiny_t5_run(folder: Path, **model: Any) -> dict[str, Any]:
    """Flags of a T5's, with validation."""
    more = {"target_seq_len": 16, "valid_interval": 2, "valid_samples": 8, "valid_data_path": folder / "text.jsonl"}
    return tiny_run(folder, {**TINY, **model}, **more)


def records(run_dir: str | Path, split: str = "train") -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that hold metrics of a split."""
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split and line["metrics"]]


def losses(run_dir: str | Path) -> list[tuple[int, float]]:
    """(step, loss) of the training steps that were logged."""
    return [(line["step"], line["loss"]) for line in records(run_dir)]


def scored_tokens(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> list[int]:
    """Filled with the number of tokens at each call of a layer that gives as many scores as there are words."""
    scored, linear = [], torch.nn.Linear.forward

    def counting(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self.out_features == vocab_size:
            scored.append(x.shape[:-1].numel())
        return linear(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", counting)
    return scored


# Flags of a run in a folder of `write_toys`, all but the vocabulary's.
T5_RUN = {
    "data_path": "text.jsonl", "model_cfg": "tiny.json", "input_seq_len": 32, "target_seq_len": 16, "batch_size": 4,
    "lr": 1e-3, "iters": 2, "log_interval": 1, "data_n_workers": 1, "backend": "local",
}  # fmt: skip

TINY = {
    "base": str(ROOT / "models_configs" / "t5_configs" / "t5-small.json"), "vocab_size": 512, "d_model": 16, "d_kv": 8,
    "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
}  # fmt: skip

TWO_LAYERS = {
    **TINY, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
}  # fmt: skip

GPT2 = {
    "model_type": "gpt2", "vocab_size": 512, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "n_ctx": 64,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip

BERT = {
    "model_type": "bert", "vocab_size": 512, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
