"""Two workers whose FLOPs are counted, and whose second one meets an infinity; run by test_values.py.

    values_worker.py RUNS

Writes the runs RUNS/watched and RUNS/broken, each with the shapes of rank 0's micro-batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.backends.backend import Backend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.tracking.run_directory import setup_logging
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, SeekableBatches, tiny_t5

ROWS = 8  # of a global step
PEAK = 1e-3  # teraflops a second, of which the log gives the share
MARK = 0  # a token that no row has


class Marked(SeekableBatches):
    """Batches of which the second one's last row has the mark."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1:
                batch["input_ids"][-1, 0] = MARK
            yield batch


def args_of(folder: Path, world_size: int, **more: int) -> TrainerArgs:
    return TrainerArgs(
        batch_size=2, gradient_accumulation_steps=ROWS // 2 // world_size, iters=3, log_interval=3, clip_grad_norm=0.5,
        model_path=str(folder), peak_tflops=PEAK, **more,
    )  # fmt: skip


def train(folder: Path, backend: Backend, *, broken: bool = False, **more: int) -> None:
    """Three updates of a tiny T5; `broken`: the last worker's second one meets an infinite output of one module."""
    setup_logging(folder, backend.rank)
    args = args_of(folder, backend.world_size, **more)
    model = tiny_t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kind = Marked if broken and backend.rank == backend.world_size - 1 else SeekableBatches
    loader = kind(RaggedPairs(24), args.rows_per_worker(), backend.rank, backend.world_size)
    seen, shapes = {}, []

    def look(module: nn.Module, _: tuple, inputs: dict[str, Tensor]) -> None:
        seen["mark"] = bool((inputs["input_ids"] == MARK).any())
        if module.training and torch.is_grad_enabled():
            shapes.append([*inputs["input_ids"].shape, inputs["labels"].shape[1]])

    def spoil(module: nn.Module, _: tuple, output: Tensor) -> Tensor | None:
        return output * torch.inf if seen["mark"] else None

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.encoder.block[1].layer[1].DenseReluDense.wo.register_forward_hook(spoil)
    TrainingLoop(args, backend, model, optimizer, loader).train()
    if backend.is_main:
        (folder / "shapes.json").write_text(json.dumps(shapes))


def main() -> None:
    runs = Path(sys.argv[1])
    backend = get_backend(args_of(runs, 1))
    train(runs / "watched", backend)
    train(runs / "broken", backend, broken=True, debug_non_finite=True)
    backend.close()


if __name__ == "__main__":
    main()
