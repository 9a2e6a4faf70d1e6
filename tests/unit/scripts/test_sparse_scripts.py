"""The pre-training scripts with a model of transformers whose configuration file names a layout."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

import run_t5_pretraining
from lm_experiments_tools.attention import huggingface
from lm_experiments_tools.models.presets import list_presets
from tests.helpers.runs import T5_RUN, losses, words, write_text
from tests.helpers.runs import TINY as TINY_T5
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

LAYOUT = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 4, "num_sliding_window_blocks": 1}}


@pytest.fixture
def layouts(monkeypatch) -> list[Any]:
    """The layout of each attention call, all of which are computed by the sparse backend."""
    seen = []
    attend = functools.partial(huggingface.block_sparse_attention, backend="blocks")

    def spy(q: Tensor, k: Tensor, v: Tensor, layout: Any, **options: Any) -> Tensor:
        seen.append(layout)
        return attend(q, k, v, layout, **options)

    monkeypatch.setattr(huggingface, "block_sparse_attention", spy)
    return seen


def run(main: Any, **flags: Any) -> list[float]:
    """The losses that were logged."""
    flags = {"model_path": "run", "batch_size": 4, "lr": 1e-2, "log_interval": 1, "backend": "local", **flags}
    main(words(**flags))
    return [loss for _, loss in losses("run")]


def assert_loads_sparse(model_cls: type, layouts: list[Any]) -> None:
    model = model_cls.from_pretrained("run/last")
    assert model.config._attn_implementation == "block_sparse"
    layouts.clear()
    ids = torch.arange(5, 45)[None]
    sparse = model(input_ids=ids, **({"labels": ids} if model.config.is_encoder_decoder else {}))[0]
    assert {type(layout).__name__ for layout in layouts} >= {"BigBirdSparsityConfig"}
    model.set_attn_implementation("eager")
    assert not torch.allclose(sparse, model(input_ids=ids, **({"labels": ids} if sparse.dim() == 0 else {}))[0])


def test_t5_trains_block_sparsely_resumes_and_loads(tmp_path, monkeypatch, layouts):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    values = {**TINY_T5, "base": str(list_presets()["t5-small-bigbird"]), **LAYOUT, "dropout_rate": 0.0}
    (tmp_path / "sparse.json").write_text(json.dumps(values))
    flags = {**T5_RUN, "vocab": numbered_words_vocabulary(tmp_path), "model_cfg": "sparse.json", "input_seq_len": 64}
    flags |= {"target_seq_len": 32, "lr": 1e-2, "model_cls": "transformers:T5ForConditionalGeneration"}
    logged = run(run_t5_pretraining.main, **{**flags, "iters": 4})
    assert len(logged) == 4 and logged[-1] < logged[0]
    names = [type(layout).__name__ for layout in layouts]
    step = ["BigBirdSparsityConfig", "NoneType", "NoneType"]  # encoder, decoder, cross-attention
    assert names == step * 4
    assert run(run_t5_pretraining.main, **{**flags, "iters": 5})[:4] == logged
    assert_loads_sparse(T5ForConditionalGeneration, layouts)
