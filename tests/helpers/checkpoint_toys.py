"""A small checkpoint and how to damage it, and a small T5 whose weights all differ: for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint.tree import save_tree
from lm_experiments_tools.checkpoint.writer import CheckpointWriter
from lm_experiments_tools.models.build import build_model


def write(root: Path, step: int, *, keep: int | None = None, best: bool = False, seed: int | None = None) -> Path:
    """A small committed checkpoint with a nested file."""
    writer = CheckpointWriter(root, keep)
    directory = writer.begin(step)
    generator = torch.Generator().manual_seed(step if seed is None else seed)
    with writer.guarded(step):
        save_tree(directory / "trainer_state", {"step": step, "weights": torch.randn(50, generator=generator)})
        (directory / "rng").mkdir()
        save_tree(directory / "rng" / "rank0", {"torch": torch.arange(8, dtype=torch.uint8)})
    return writer.commit(step, is_best=best, extra_manifest={"world_size": 2})


def flip(name: str, where: float) -> Callable[[Path], None]:
    """Changes one bit of a file of a checkpoint, at a fraction of its size."""

    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int((len(content) - 1) * where)] ^= 4
        (path / name).write_bytes(content)

    return damage


def random_t5(seed: int = 0, *, tied: bool = True, **changes: object) -> nn.Module:
    """HF's T5 with 2 + 2 layers of width 16, or (not `tied`) T5 v1.1, with an output layer of its own."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    config = T5Config(**{"feed_forward_proj": "relu" if tied else "gated-gelu", **sizes, **changes})
    if not tied:  # after construction: T5Config forces it back to True
        config.tie_word_embeddings = config.scale_decoder_outputs = False
    model = build_model(T5ForConditionalGeneration, config, seed=seed).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # T5's own initialisation has zeros and ones that hide a lost weight
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def gathered_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as a backend that shards them gathers them: each call gives a tensor of its own."""

    class Gathering(LocalBackend):
        def _get_weight(self, name, tensor, rank):
            return tensor.detach().clone()

    backend = Gathering(device=torch.device("cpu"))
    backend.setup(model, None)
    return backend.state.model_state()


def logits(model: nn.Module) -> torch.Tensor:
    inputs = torch.arange(2, 34).reshape(2, 16)
    with torch.no_grad():
        return model(input_ids=inputs, labels=inputs[:, :8].contiguous()).logits
