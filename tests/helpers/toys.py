"""Small models and data that the tests of the loop share; everything is drawn from fixed seeds."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

VOCABULARY_SIZE = 64


def tiny_t5(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """HF's T5 with 2 + 2 layers of width 16."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY_SIZE, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


class TinyLabeller(nn.Module):
    """Guesses each label from the mean of the inputs; needs no transformers, whose import takes a job's longest."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY_SIZE, width), nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids).mean(1))[:, None].expand(-1, labels.shape[1], -1)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class RaggedPairs(Dataset):
    """Sequence pairs whose targets have 1 to 8 tokens, so that a mean of means is wrong by a lot."""

    def __init__(self, size: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(size):
            length = int(torch.randint(1, 9, (), generator=generator))
            labels = torch.full((8,), -100)
            labels[:length] = torch.randint(1, VOCABULARY_SIZE, (length,), generator=generator)
            input_ids = torch.randint(1, VOCABULARY_SIZE, (10,), generator=generator)
            self.rows.append(
                {"input_ids": input_ids, "attention_mask": torch.ones(10, dtype=torch.long), "labels": labels}
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([self.rows[i][name] for i in indices]) for name in self.rows[0]}


class SeekableBatches:
    """An endless loader with `data.loader.TrainLoader`'s interface, over `RaggedPairs` in a fixed shuffled order."""

    fingerprint = "ragged-pairs"

    def __init__(self, data: RaggedPairs, rows: int, rank: int = 0, world_size: int = 1) -> None:
        self.data, self.rows, self.rank, self.world_size = data, rows, rank, world_size
        self.consumed = 0

    def seek(self, consumed_samples: int) -> None:
        self.consumed = consumed_samples

    def _row(self, sample: int) -> int:
        epoch, index = divmod(sample, len(self.data))
        return int(torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch))[index])

    def __iter__(self):
        while True:
            first = self.consumed + self.rank * self.rows
            self.consumed += self.rows * self.world_size
            yield self.data.batch([self._row(i) for i in range(first, first + self.rows)])


def gradients_at_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Filled, at each step of the optimizer, with the gradients it is given."""
    seen: dict[str, torch.Tensor] = {}

    def note(*_: object) -> None:
        seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(note)
    return seen


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
