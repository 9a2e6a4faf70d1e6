"""Train a model of your own with Trainer, on Horovod's workers or in one process.

    horovodrun --gloo -np 2 python examples/library_trainer.py runs/own_model
    python examples/library_trainer.py runs/own_model

The model tells which of four symbols is the most frequent one in a row of 32. A model needs `forward(**batch)` that
returns a mapping with `loss`; what else it returns is for your metrics.
"""

import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lm_experiments_tools import Trainer, TrainerArgs


class Rows(Dataset):
    """Rows of symbols 0 to 3, one of which is likelier than the others: `input_ids` int64[32], `labels` int64[]."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        favourites = torch.randint(4, (count, 1), generator=generator)
        drawn = torch.randint(4, (count, 32), generator=generator)
        self.rows = torch.where(torch.rand(count, 32, generator=generator) < 0.2, favourites, drawn)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].bincount(minlength=4).argmax()}


class MostFrequent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 16), nn.Linear(16, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def keep(batch: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is kept of each micro-batch for `metrics`, here int64[rows]."""
    return {"predicted": outputs["logits"].argmax(-1), "labels": batch["labels"]}


def metrics(kept: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics over the rows of all workers: `kept` has the entries of `keep`, each one tensor int64[all rows].

    It is called on rank 0, once a validation and once a log line of training.
    """
    return {"accuracy": (kept["predicted"] == kept["labels"]).float().mean().item()}


def main(folder: str) -> None:
    hvd.init()
    torch.manual_seed(0)
    args = TrainerArgs(
        model_path=folder, iters=60, batch_size=16, log_interval=20, valid_interval=20, save_interval=20,
        save_best=True, optimize_metric="accuracy", optimize_mode="max",
    )  # fmt: skip
    splits = {"train": Rows(4000, seed=1), "valid": Rows(300, seed=2), "test": Rows(301, seed=3)}
    loaders = {}
    for split, rows in splits.items():
        # Each worker reads its part. A row that the sampler repeats to fill the last batch counts once.
        sampler = DistributedSampler(rows, hvd.size(), hvd.rank(), shuffle=split == "train")
        loaders[split] = DataLoader(rows, batch_size=args.rows_per_worker(), sampler=sampler)
    model = MostFrequent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        args, model, optimizer, loaders["train"], loaders["valid"], keep_for_metrics_fn=keep, metrics_fn=metrics
    )
    trainer.train()
    trainer.load(f"{folder}/best")  # the weights; `last` are those of the end
    found = trainer.validate(loaders["test"], "test")
    trainer.save_metrics(folder)
    if trainer.backend.is_main:
        print(f"test accuracy {found['accuracy']:.3f} of the best step, {trainer.state.best_step}")


if __name__ == "__main__":
    main(sys.argv[1])
