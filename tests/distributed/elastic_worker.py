"""One start of a run of test_elastic.py: goes on to a step with as many workers as there are.

    elastic_worker.py RUN STEP [FLAG=VALUE ...]

Rank 0 prints `digest` and a hash of all that the next steps depend on: weights, optimizer, grids, metrics, position.
"""

import hashlib
import json
import sys
from dataclasses import asdict

import numpy as np
import torch

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.data.dataset import SampleDataset
from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, tiny_t5

STEPS, SAMPLES, VIRTUAL = 9, 50, 12


class Numbered(SampleDataset):
    """Rows of `RaggedPairs` by global number, each epoch in an order of its own."""

    fingerprint = "ragged pairs, numbered"

    def __init__(self, size: int) -> None:
        self.data, self.samples_per_epoch = RaggedPairs(size), size

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        size = self.samples_per_epoch
        rows = [self.data[int((number * 7 + number // size) % size)] for number in samples]
        return {name: np.stack([row[name].numpy() for row in rows]) for name in rows[0]}


def args_of(run: str, step: str, **more: str) -> TrainerArgs:
    settings = {
        "batch_size": 2, "gradient_accumulation_steps": 1, "iters": int(step), "log_interval": 4, "valid_interval": 3,
        "save_interval": 2, "clip_grad_norm": 0.5, "model_path": run, "pad_to_multiple_of": 2, "stall_timeout": 60,
        "lr_scheduler": "linear", "num_warmup_steps": 2, "num_training_steps": STEPS,
        "reproducible": "elastic", "save_best": True,
    }  # fmt: skip
    return TrainerArgs(**settings | more)


def digest(loop: TrainingLoop) -> str:
    whole = hashlib.sha256()
    state = {**loop.backend.state.model_state(), **_tensors("optimizer", loop.backend.state.optimizer_state())}
    for name in sorted(state):
        whole.update(name.encode() + state[name].numpy().tobytes())
    told = asdict(loop.state) | {"exponents": getattr(loop.backend.reduction, "exponents", None)}
    whole.update(json.dumps(told, sort_keys=True).encode())
    return whole.hexdigest()


def _tensors(name, tree):
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {key: tensor for part, value in parts for key, tensor in _tensors(f"{name}.{part}", value).items()}


def main() -> None:
    run, step, *more = sys.argv[1:]
    args = args_of(run, step, **dict(item.split("=") for item in more))
    backend = get_backend(args)
    model = tiny_t5(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    where = (args.rows_on_worker(backend.world_size), backend.rank, backend.world_size)
    loop = TrainingLoop(
        args, backend, model, optimizer, TrainLoader(Numbered(SAMPLES), *where), ValidLoader(Numbered(17), *where)
    )
    torch.manual_seed(1000 * backend.world_size + backend.rank)  # noise must not come from here
    loop.train()
    if backend.is_main:
        print(f"digest {digest(loop)} of {backend}\n", end="", flush=True)
    backend.close()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print("refused:", error, file=sys.stderr)
        sys.exit(2)
