"""A training step with `--reproducible elastic` next to one without. Writes benchmarks/reproducible.md.

    OMP_NUM_THREADS=1 python benchmarks/reproducible.py                                # one process
    OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1 torchrun --nproc_per_node 2 benchmarks/reproducible.py

Both step in turn (A B A B ...) over the same rows, split into the same micro-batches; figures are CPU seconds of one
process, the communication of its threads included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.backends.backend import Backend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.models.build import build_model, load_model_config, num_parameters
from lm_experiments_tools.optimizers import AdamWScale
from modeling_t5 import T5ForConditionalGeneration

HERE = Path(__file__).with_suffix(".md")
HEAD = """# What --reproducible costs

Seconds of CPU of one process in one step, `--reproducible off` and `elastic` in turn over the same rows; ratio of the
medians and, in parentheses, of the fastest steps. `benchmarks/reproducible.py` adds rows, and has the commands.

| model | parameters | rows x length | micro-batches | workers | off | elastic | ratio |
|---|---|---|---|---|---|---|---|
"""


def prepared(how: str, options: argparse.Namespace, world_size: int) -> Backend:
    flags = {"batch_size": options.rows, "gradient_accumulation_steps": options.accumulate, "bf16": True}
    args = TrainerArgs(reproducible=how, **flags, **({"virtual_ranks": world_size} if how == "elastic" else {}))
    backend = get_backend(args)
    model = build_model(T5ForConditionalGeneration, load_model_config(options.preset), seed=0)
    model.train()
    backend.setup(model, AdamWScale(model.parameters(), lr=1e-3))
    return backend


def step(backend: Backend, batch: dict[str, torch.Tensor], accumulate: int) -> float:
    started = time.process_time()
    for i in range(accumulate):
        with backend.accumulate(sync=i == accumulate - 1):
            with backend.autocast():
                loss = backend.model(**batch, use_cache=False)["loss"]
            backend.backward(loss / accumulate)
    assert not backend.must_repeat()
    backend.clip_and_step(1.0)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="t5-v1_1-small")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    world_size = get_backend(TrainerArgs()).world_size
    backends = {how: prepared(how, options, world_size) for how in ("off", "elastic")}
    model = backends["off"].unwrap()
    vocabulary = model.config.vocab_size
    batch = {
        "input_ids": torch.randint(0, vocabulary, (options.rows, 512)),
        "labels": torch.randint(0, vocabulary, (options.rows, 114)),
    }
    for backend in backends.values():
        step(backend, batch, options.accumulate)
    seconds: dict[str, list[float]] = {how: [] for how in backends}
    for _ in range(options.rounds):
        for how, backend in backends.items():
            seconds[how].append(step(backend, batch, options.accumulate))
    off, elastic = (statistics.median(seconds[how]) for how in backends)
    row = (
        f"| {options.preset} | {num_parameters(model).total:,} | {options.rows} x 512/114 | {options.accumulate} | "
        f"{world_size} | {off:.2f} | {elastic:.2f} | {elastic / off:.2f} "
        f"({min(seconds['elastic']) / min(seconds['off']):.2f}) |\n"
    )
    if backends["off"].is_main:
        print(row, end="")
        HERE.write_text((HERE.read_text() if HERE.exists() else HEAD) + row)


if __name__ == "__main__":
    main()
