"""The settings in examples/published: each builds the model that it is about, and makes a step at small sizes."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import run_bert_pretraining
import run_t5_pretraining
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.names import resolve_name
from tests.helpers import ROOT
from tests.helpers.bert_toys import TINY as SMALL_BERT
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.runs import TINY as SMALL_T5
from tests.helpers.runs import records
from tests.helpers.token_toys import make_texts, write_jsonl

RECIPES = sorted((ROOT / "examples" / "published").glob("*.yaml"))
# Parameters as published: T5 1.1's 248 million, BERT's and Megatron's 110 and 336 with the heads of pre-training.
PARAMETERS = {"t5-v1_1-base": 247_577_856, "bert_base_uncased": 110_106_428, "bert_large_uncased": 336_226_108}
WORKERS = {"ancestor_t5_small": 2, "ancestor_t5_base_cdq": 4}
# Updates and examples of each: nanoT5's configs/task/*.yaml, t5-experiments' README.md, the papers.
BUDGETS = {
    "nanot5_base": (65_536, 128), "nanot5_base_4h": (13_333, 256), "nanot5_base_8h": (26_666, 256),
    "nanot5_base_12h": (39_999, 256), "nanot5_base_16h": (53_332, 256), "nanot5_base_20h": (66_665, 256),
    "nanot5_base_24h": (79_998, 256), "ancestor_t5_small": (1_100_000, 128), "ancestor_t5_base_cdq": (1_000_000, 128),
    "bert_base_128": (900_000, 256), "bert_base_512": (1_000_000, 256), "megatron_bert_336m": (2_000_000, 1024),
}  # fmt: skip


def settings(path: Path):
    return parse(BertPretrainingArgs if "bert" in path.stem else T5PretrainingArgs, ["--config", str(path)])[0]


@pytest.fixture(scope="module")
def bert_data(tmp_path_factory):
    return make_bert_data(tmp_path_factory.mktemp("bert"))


def test_every_published_budget_is_there():
    assert [path.stem for path in RECIPES] == sorted(BUDGETS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_what_was_published(path):
    args = settings(path)
    assert (args.iters, args.global_batch_size(WORKERS.get(path.stem, 1))) == BUDGETS[path.stem]
    cls = resolve_name(args.model_cls)
    with torch.device("meta"):
        model = build_model(cls, load_model_config(args.model_cfg, cls.config_class), seed=0)
    if args.model_cfg in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[args.model_cfg]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_makes_a_step_through_an_override_file(path, tmp_path, monkeypatch, bert_data):
    is_bert = "bert" in path.stem
    sizes = dict(SMALL_BERT if is_bert else SMALL_T5) | {"base": settings(path).model_cfg}
    if sizes["base"].startswith("t5-base-only"):
        sizes |= {"num_cdq_heads": 2}
    (tmp_path / "small.json").write_text(json.dumps(sizes))
    changes = {
        "base": str(path), "model_cfg": str(tmp_path / "small.json"), "model_path": str(tmp_path / "run"),
        "working_dir": str(tmp_path), "init_checkpoint": None, "input_seq_len": 64, "batch_size": 2,
        "gradient_accumulation_steps": 1, "iters": 1, "log_interval": 1, "num_warmup_steps": 1,
    }  # fmt: skip
    if is_bert:
        changes |= {"data_path": str(bert_data / "train"), "vocab_file": str(bert_data / "vocab.txt")}
    else:
        changes |= {} if settings(path).lr_scheduler else {"num_warmup_steps": None}
        text = write_jsonl(tmp_path / "text.jsonl", make_texts(40))
        changes |= {"data_path": text, "vocab": "bytes", "data_pipeline": "native", "target_seq_len": 40}
        changes |= {"valid_data_path": text} if settings(path).valid_data_path else {}
    (tmp_path / "override.yaml").write_text(yaml.safe_dump(changes))
    monkeypatch.chdir(tmp_path)
    (run_bert_pretraining if is_bert else run_t5_pretraining).main(["--config", "override.yaml", "--speed", "off"])
    (step,) = records(tmp_path / "run")
    assert step["step"] == 1 and 0 < step["loss"] < 20
