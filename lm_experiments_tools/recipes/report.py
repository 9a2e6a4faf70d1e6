"""The final `--report` of a run: losses, their curve, and validation examples with the model's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.data.loader import ValidLoader
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.modules.inspection import forward_names
from lm_experiments_tools.tracking.curve import plot_runs
from lm_experiments_tools.tracking.examples import example_lines
from lm_experiments_tools.tracking.tracker import parse_record

if TYPE_CHECKING:
    from lm_experiments_tools.training.trainer import TrainingLoop

NUM_EXAMPLES = 3

# Input, target and prediction of one row of a batch, int64[length] each; collective for a sharded model.
Predict = Callable[["TrainingLoop", Any, Mapping[str, Tensor]], tuple[Tensor, Tensor, Tensor]]


def write_report(trainer: TrainingLoop, vocabulary: Any, predict: Predict) -> None:
    """Print losses and examples on rank 0, and write them to report.txt and loss.png of the run; collective.

    `predict` is `written`, `continued` or `unmasked`.
    """
    rows: list[Any] = []
    if trainer.valid_dataloader is not None:
        rows = _held_out(trainer.valid_dataloader)
    examples = _predicted(trainer, vocabulary, rows, predict)
    if not trainer.backend.is_main:
        return
    folder, metrics = Path(trainer.args.model_path), trainer.state.metrics
    before = f"{metrics['start']['loss']:.3f} before training, " if "start" in metrics else ""
    lines = [f"Loss on held-out text: {before}{metrics['valid']['loss']:.3f} after {trainer.state.step} steps"]
    for example in examples:
        lines += ["", *example_lines("held-out", example)]
    records = map(parse_record, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    plot_runs({folder.name: [*filter(None, records)]}, folder / "loss.png")
    lines += ["", f"Loss curve:  {folder / 'loss.png'}", f"TensorBoard: tensorboard --logdir {folder}"]
    lines += [f"Checkpoint:  {folder / 'last'} (loads with from_pretrained)"]
    text = "\n".join(lines)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    print("\n" + text, flush=True)


def _held_out(source: Any) -> list[dict[str, Tensor]]:
    """A few rows spread over the validation data, whose first rows may be the longest."""
    if not isinstance(source, ValidLoader):
        return _rows(next(iter(source)))
    numbers = np.unique(np.linspace(0, source.num_samples - 1, NUM_EXAMPLES).astype(np.int64))
    batch = source.dataset.batch(numbers)
    return _rows({name: torch.from_numpy(values) for name, values in batch.items()})


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor) and value.dim() == 2}
    return [
        {name: value[i] for name, value in tensors.items()} for i in range(min(NUM_EXAMPLES, len(batch["labels"])))
    ]


def _predicted(
    trainer: TrainingLoop, vocabulary: Any, rows: list[dict[str, Tensor]], predict: Predict
) -> list[dict[str, Any]]:
    """Rank 0's rows and the model's predictions, as texts."""
    trainer.backend.model.eval()
    examples = []
    for number, row in enumerate(trainer.backend.broadcast(rows)):
        with torch.no_grad():
            parts = zip(("input", "target", "prediction"), predict(trainer, vocabulary, row), strict=True)
        examples.append({"id": number, **{name: vocabulary.decode(ids.tolist()) for name, ids in parts}})
    return examples


def written(trainer: TrainingLoop, vocabulary: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Generate an encoder-decoder's output for the input of a row of validation data."""
    source, target = _attended(row, "input_ids"), row["labels"][row["labels"] != IGNORED_LABEL]
    found = _generated(trainer, vocabulary, source, len(target) + 1)[1:]
    return source, target, found[(found == vocabulary.eos_id).cumsum(0) == 0]


def continued(trainer: TrainingLoop, vocabulary: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Generate a language model's continuation of the first half of a row."""
    text = row["labels"][row["labels"] != IGNORED_LABEL]
    given, rest = text[: len(text) // 2], text[len(text) // 2 :]
    if not trainer.step.split.has_decoder:
        return given, rest, _generated(trainer, vocabulary, given, len(rest))[len(given) :]
    start = given.new_tensor([trainer.backend.unwrap().config.decoder_start_token_id])
    prefix = torch.cat([start, given])[None].to(trainer.backend.device)
    source = _attended(row, "input_ids")
    output = _generated(trainer, vocabulary, source, len(rest), decoder_input_ids=prefix)
    return given, rest, output[1 + len(given) :]


def unmasked(trainer: TrainingLoop, vocabulary: Any, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row's ids, and the true and the predicted ids at its masked positions, by a masked language model."""
    model, device = trainer.backend.model, trainer.backend.device
    ids, labels = (_attended(row, name) for name in ("input_ids", "labels"))
    inputs = {"input_ids": ids[None].to(device)}
    if "token_type_ids" in row and "token_type_ids" in forward_names(trainer.backend.unwrap()):
        inputs["token_type_ids"] = _attended(row, "token_type_ids")[None].to(device)
    outputs = model(**inputs)
    best = outputs["prediction_logits" if "prediction_logits" in outputs else "logits"][0].argmax(-1).cpu()
    return ids, labels[labels != IGNORED_LABEL], best[labels != IGNORED_LABEL]


def _attended(row: Mapping[str, Tensor], name: str) -> Tensor:
    """The entry without padding; of a packed row, its first document."""
    if "segment_ids" in row:
        return row[name][row["segment_ids"] == 1]
    return row[name][row["attention_mask"].bool()] if "attention_mask" in row else row[name]


def _generated(
    trainer: TrainingLoop, vocabulary: Any, input_ids: Tensor, max_new_tokens: int, **options: Any
) -> Tensor:
    """Greedy generation by the trained model, int64[length]."""
    backend, ids = trainer.backend, input_ids[None].to(trainer.backend.device)
    if backend.state.shards_weights:  # FSDP gathers what generate reads in a forward pass of the whole
        backend.model(input_ids=ids, labels=ids)
    options |= {"pad_token_id": vocabulary.pad_id, "eos_token_id": vocabulary.eos_id, "do_sample": False}
    options |= {"max_new_tokens": max_new_tokens, "synced_gpus": backend.state.shards_weights}
    return backend.unwrap().generate(ids, **options)[0].cpu()
