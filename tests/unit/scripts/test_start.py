"""scripts/make_start.py: what `make pretrain` starts from."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from tests.helpers import ROOT
from tests.helpers.token_toys import write_tokens
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

KINDS = np.arange(10, 100).reshape(15, 6)  # of ids that stand in like places


def grammar(rows: int = 1000, seed: int = 0) -> np.ndarray:
    """Texts of one id of each kind, in the order of kinds, twice over: int64[rows, 30]."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(ids, (rows, 2)) for ids in KINDS], axis=2).reshape(rows, 30)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_start", ROOT / "scripts" / "make_start.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_start(script: ModuleType, folder: Path, output: str, data: Path | str | None = None) -> None:
    flags = {"data": data or folder / "train", "vocab": folder / "vocab.model", "model_cfg": folder / "tiny.json"}
    script.main([str(word) for flag, value in flags.items() for word in (f"--{flag}", value)] + ["--output", output])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, script: ModuleType) -> Path:
    """A vocabulary, training and held-out tokens, a model of two layers; and the start made of them."""
    folder = tmp_path_factory.mktemp("start")
    vocabulary = Tokenizer.load(str(numbered_words_vocabulary(folder)))
    write_tokens(folder / "train", [[row] for row in grammar()])
    write_tokens(folder / "valid", [[row] for row in grammar(seed=1)])
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": vocabulary.size}
    (folder / "tiny.json").write_text(json.dumps({"model_type": "t5", **shape}))
    make_start(script, folder, str(folder / "start"))
    return folder


@pytest.fixture
def model(folder) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration.from_pretrained(folder / "start", attn_implementation="eager").eval()


def test_embeddings_of_ids_that_stand_in_like_places_are_alike(model):
    with torch.no_grad():
        table = model.shared.weight[10:100]
    cosine = torch.nn.functional.cosine_similarity(table[:, None], table[None], dim=-1)
    kind = torch.arange(90) // 6
    same = kind[:, None] == kind
    assert cosine[same].min() > 2 * cosine[~same].max()
    torch.testing.assert_close(table.pow(2).mean(1), torch.ones(90))


def test_attention_starts_at_the_neighbours_and_at_the_sentinels_own_place(folder, model):
    vocabulary = Tokenizer.load(str(folder / "vocab.model"))
    row, place, sentinel = grammar(1)[0].tolist(), 15, int(vocabulary.sentinel_ids[0])
    row[place] = sentinel
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor([row]), decoder_input_ids=torch.tensor([[0, sentinel]]), output_attentions=True
        )
    for attention in outputs.encoder_attentions:
        assert attention[0, 0].diagonal(-1).mean() > 0.5 and attention[0, 1].diagonal(1).mean() > 0.5
    for attention in outputs.cross_attentions:
        assert attention[0, :, 1, place].mean() > 0.5
