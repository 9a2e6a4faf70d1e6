"""The settings in examples/published: each builds the model that it is about, and makes a step at small sizes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import run_bert_pretraining
import run_t5_pretraining
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.phases import timeline
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.models import inherited
from lm_experiments_tools.models.build import build_model, load_model_config
from lm_experiments_tools.models.from_args import make_optimizer, model_source
from lm_experiments_tools.names import resolve_name
from lm_experiments_tools.optimizers import parameter_groups
from lm_experiments_tools.training.schedules import LearningRate
from tests.helpers import ROOT

FOLDER = ROOT / "examples" / "published"
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
RECIPES = [FOLDER / f"{name}.yaml" for name in sorted(BUDGETS)]


# Recipes whose source decays norms and biases too, by its code: the file names it.
DECAY_ALL = {
    "ancestor_t5_base_cdq", "ancestor_t5_small", "babylm_strict_small", "eurobert_210m", "mosaicbert_base", "neobert",
    "roberta_base",
}  # fmt: skip


def check_decay(name: str, args, model) -> None:
    groups = parameter_groups(model.named_parameters(), args.weight_decay, args.group_rules())
    decayed = {group["weight_decay"] for group in groups}
    assert decayed == ({args.weight_decay} if name in DECAY_ALL else {args.weight_decay, 0.0})


def script_of(path: Path):
    is_t5 = path.stem.startswith(("ancestor", "fat5", "nanot5", "ul2"))
    return run_t5_pretraining if is_t5 else run_bert_pretraining


def settings(path: Path):
    if script_of(path) is run_t5_pretraining:
        return parse(T5PretrainingArgs, ["--config", str(path)])[0]
    return parse(BertPretrainingArgs, ["--config", str(path)], inherit=inherited.of_bert)[0]


def test_every_published_budget_is_there():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted([*BUDGETS, *PUBLISHED])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_what_was_published(path):
    args = settings(path)
    assert (args.iters, args.global_batch_size(WORKERS.get(path.stem, 1))) == BUDGETS[path.stem]
    cls = resolve_name(args.model_cls)
    with torch.device("meta"):
        model = build_model(cls, load_model_config(args.model_cfg, cls.config_class), seed=0)
    check_decay(path.stem, args, model)
    if args.model_cfg in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[args.model_cfg]


class Part(NamedTuple):
    """What was published of a phase: updates or tokens, rows, length, masked share, rate, schedule (kind, floor)."""

    updates: float
    rows: int
    length: int
    masked: float | None
    lr: float
    schedule: tuple[str, float] = ("constant", 1.0)


class Published(NamedTuple):
    workers: int
    layers: int
    heads: int
    optimizer: str
    betas: tuple[float, float] | None
    eps: float
    decay: float  # of a step at the full rate, fully decoupled
    parts: list[Part]


def growing(*rows):
    return [Part(10e9, n, 1024, 0.3, 8e-4, ("warm-up" if n == 768 else "constant", 1.0)) for n in rows]


BETAS = (0.9, 0.98)
PUBLISHED = {
    "modernbert_base": Published(8, 22, 12, "StableAdamW", BETAS, 1e-6, 1e-5, [
        *growing(768, 1536, 2304, 3072, 3840), Part(1669e9, 4608, 1024, 0.3, 8e-4),
        Part(250e9, 576, 8192, 0.3, 3e-4), Part(50e9, 576, 8192, 0.3, 3e-4, ("1-sqrt", 0.001))]),
    "ettin_150m": Published(4, 22, 12, "StableAdamW", BETAS, 1e-6, 1e-5, [
        Part(1.7e12, 4608, 1024, 0.3, 8e-4, ("warm-up", 1.0)), Part(250e9, 4608, 7999, 0.3, 8e-4, ("1-sqrt", 0.5)),
        Part(50e9, 4608, 7999, 0.15, 4e-4, ("1-sqrt", 0.04))]),
    "mmbert_base_decay": Published(8, 22, 12, "StableAdamW", (0.9, 0.95), 1e-8, 8e-5, [
        Part(100e9, 4608, 8192, 0.05, 8e-4, ("1-sqrt", 0.02))]),
    "neobert": Published(8, 28, 12, "AdamW", (0.9, 0.95), 1e-8, 1e-6, [
        Part(1_000_000, 2048, 1024, 0.2, 1e-4, ("cosine", 0.1)), Part(50_000, 512, 4096, 0.2, 1e-5)]),
    "eurobert_210m": Published(192, 12, 12, "AdamW", (0.9, 0.95), 1e-5, 1e-5, [
        Part(4.8e12, 4608, 2048, 0.5, 1e-4, ("warm-up", 1.0)), Part(200e9, 1152, 8192, 0.1, 1e-4, ("linear", 0.0))]),
    "mosaicbert_base": Published(8, 12, 12, "AdamW", BETAS, 1e-6, 1e-5, [
        Part(70_000, 4096, 128, 0.3, 5e-4, ("linear", 0.02))]),
    "roberta_base": Published(32, 12, 12, "AdamW", BETAS, 1e-6, 6e-6, [
        Part(500_000, 8192, 512, 0.15, 6e-4, ("linear", 0.0))]),
    "babylm_strict_small": Published(1, 12, 12, "AdamW", (0.9, 0.999), 1e-8, 1e-5, [
        Part(280e6, 128, 128, 0.15, 1e-4, ("warm-up", 1.0))]),
    "ul2_base": Published(8, 12, 12, "Adafactor", None, 0, 0, [
        Part(500_000, 128, 512, None, 1.0, ("inverse square root", 0.0))]),
    "fat5_small": Published(1, 12, 8, "AdamWScale", (0.9, 0.999), 1e-6, 0, [
        Part(1_600_000, 512, 512, None, 5e-3, ("cosine from half", 0.002))]),
}  # fmt: skip
ALL_MASK = {"neobert", "eurobert_210m"}


def phase_args(name: str) -> list:
    return timeline(settings(FOLDER / f"{name}.yaml"), PUBLISHED[name].workers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_phases_are_as_long_and_as_large_as_published(name):
    published, end = PUBLISHED[name], 0
    for part, args in zip(published.parts, phase_args(name), strict=True):
        is_in_tokens = part.updates > 2e6
        end += math.ceil(part.updates / (part.rows * part.length)) if is_in_tokens else int(part.updates)
        assert (args.iters, args.global_batch_size(published.workers)) == (end, part.rows)
        assert args.input_seq_len == part.length


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_is_the_published_one(name):
    source = model_source(settings(FOLDER / f"{name}.yaml"), LocalBackend())
    with torch.device("meta"):
        model = source.cls(source.config)
    check_decay(name, settings(FOLDER / f"{name}.yaml"), model)
    encoder = model.encoder if hasattr(model, "encoder") else model.bert.encoder
    layers = encoder.block if hasattr(encoder, "block") else encoder.layer
    assert (len(layers), model.config.num_attention_heads) == (PUBLISHED[name].layers, PUBLISHED[name].heads)
    sizes = {"modernbert_base": 149e6, "ettin_150m": 149e6, "mmbert_base_decay": 307e6, "mosaicbert_base": 137e6}
    sizes |= {"eurobert_210m": 309e6, "roberta_base": 124.7e6, "babylm_strict_small": 124.7e6, "fat5_small": 147e6}
    if name in sizes:
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(sizes[name], rel=0.01)


def factor(part: Part, step: int, steps: int, args) -> float:
    """The closed form of a schedule: the part of the rate at an update of the phase."""
    (kind, floor), warm = part.schedule, args.num_warmup_steps or 0
    if kind == "inverse square root":
        return max(step, warm) ** -0.5
    if step < warm:
        return 0.5 + step / warm / 2 if kind == "cosine from half" else step / warm
    done = min(1.0, (step - warm) / ((args.num_training_steps or steps) - warm))
    left = {"linear": 1 - done, "1-sqrt": 1 - done**0.5}.get(kind, (1 + math.cos(math.pi * done)) / 2)
    return 1.0 if kind in ("constant", "warm-up") else floor + (1 - floor) * left


@pytest.mark.parametrize("name", PUBLISHED)
def test_optimizer_rates_and_masks_of_each_phase_are_those_that_were_published(name):
    published, begin = PUBLISHED[name], 0
    for part, args in zip(published.parts, phase_args(name), strict=True):
        steps, begin = args.iters - begin, args.iters
        matrix = [("layer.0.weight", torch.nn.Parameter(torch.zeros(2, 2)))]
        optimizer = make_optimizer(args, matrix, args.group_rules())
        group = optimizer.param_groups[0]
        assert type(optimizer).__name__ == published.optimizer
        assert published.betas is None or (tuple(group["betas"]), group["eps"]) == (published.betas, published.eps)
        # torch's decay falls with the rate.
        follows = part.lr / published.parts[0].lr if published.optimizer == "AdamW" else 1
        assert group["weight_decay"] * part.lr == pytest.approx(published.decay * follows)
        rate = LearningRate(replace(args, iters=steps), optimizer)
        for step in (0, 1, 500, steps // 2, steps - 1):
            rate.set(optimizer, step)
            assert group["lr"] == pytest.approx(part.lr * factor(part, step, steps, args), rel=1e-6, abs=1e-12)
        if part.masked:
            masks = (1, 0, 0) if name in ALL_MASK else (0.8, 0.1, 0.1)
            assert (args.mlm_prob, args.mask_replace) == (part.masked, masks)
