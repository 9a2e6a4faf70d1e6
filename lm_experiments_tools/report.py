"""What a run shows at its end (`--report`): losses before and after, blanks filled in, the curve, where to look on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.plots import plot_curve

if TYPE_CHECKING:
    from lm_experiments_tools.data.pretraining import PretrainingData
    from lm_experiments_tools.data.vocabulary import Vocabulary
    from lm_experiments_tools.trainer import TrainingLoop

NUM_EXAMPLES = 3
WINDOW = 48  # tokens of text in an example
NUM_BLANKS = 2
NUM_OTHERS = 3  # next best first pieces to show


def write_report(trainer: TrainingLoop, data: PretrainingData) -> None:
    """Print the report on rank 0 and write it to report.txt and loss.png of the run; every worker calls it."""
    folder = Path(trainer.args.model_path)
    lines = [_losses(trainer)]
    for number, (text, truth, guess) in enumerate(fill_in_examples(trainer, data), start=1):
        lines += ["", f"Held-out text {number}:", f"  {text}", f"  true:  {truth}", f"  model: {guess}"]
    if not trainer.backend.is_main:
        return
    curve = plot_curve(folder / "metrics.jsonl", folder / "loss.png")
    lines += ["", f"Loss curve:  {curve}", f"TensorBoard: tensorboard --logdir {folder}"]
    lines += [f"Checkpoint:  {folder / 'last'} (loads with from_pretrained)"]
    text = "\n".join(lines)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    print("\n" + text, flush=True)


def _losses(trainer: TrainingLoop) -> str:
    metrics, step = trainer.state.metrics, trainer.state.step
    before, after = metrics.get("start"), metrics["valid"]
    came_from = f"{before['loss']:.3f} before training, " if before else ""
    return f"Loss on held-out text: {came_from}{after['loss']:.3f} after {step} steps"


def fill_in_examples(trainer: TrainingLoop, data: PretrainingData) -> list[tuple[str, str, str]]:
    """(text with numbered blanks, what stood there, what the model writes there) for a few validation documents."""
    tokens, vocabulary = data.valid_tokens, data.vocabulary
    starts = tokens.sequence_pointers // tokens.dtype.itemsize
    long_enough = np.flatnonzero(tokens.sequence_lengths >= WINDOW)
    chosen = long_enough[np.linspace(0, len(long_enough) - 1, NUM_EXAMPLES).astype(int)] if len(long_enough) else []
    model = trainer.backend.unwrap().eval()
    examples = []
    for index in chosen:
        window = np.asarray(tokens.tokens[starts[index] : starts[index] + WINDOW], dtype=np.int64)
        inputs, spans = hide_words(window, vocabulary)
        ids = torch.from_numpy(np.append(inputs, vocabulary.eos_id))[None].to(trainer.backend.device)
        with torch.no_grad():
            if trainer.backend.shards_model:  # FSDP gathers what generate reads in a forward pass of the whole
                trainer.backend.model(input_ids=ids, labels=ids[:, :1])
            output = model.generate(
                ids, max_new_tokens=12 * NUM_BLANKS, do_sample=False, synced_gpus=trainer.backend.shards_model,
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
        guesses = read_guesses(output.sequences[0].tolist(), output.scores, vocabulary)
        examples.append((
            _numbered(vocabulary.decode(inputs.tolist())),
            "  ".join(f"[{i + 1}] {vocabulary.decode(span.tolist())}" for i, span in enumerate(spans)),
            "  ".join(f"[{i + 1}] {guesses.get(i, '(nothing)')}" for i in range(len(spans))),
        ))  # fmt: skip
    return examples


def hide_words(window: np.ndarray, vocabulary: Vocabulary) -> tuple[np.ndarray, list[np.ndarray]]:
    """Replace the words nearest to one third and two thirds of a token window by sentinels.

    Returns:
        The window with sentinels, and the hidden pieces in order.
    """
    starts = [i for i in range(len(window)) if vocabulary.starts_word(int(window[i]))]
    words = [(begin, end) for begin, end in pairwise(starts) if _is_word(vocabulary.decode(window[begin:end]))]
    pieces, spans, done = [], [], 0
    for blank in range(min(NUM_BLANKS, len(words))):
        middle = (blank + 1) * len(window) / (NUM_BLANKS + 1)
        begin, end = min((w for w in words if w[0] >= done), key=lambda word: abs(word[0] - middle), default=(0, 0))
        if begin == end:
            break
        pieces += [window[done:begin], vocabulary.sentinel_ids[blank : blank + 1]]
        spans.append(window[begin:end])
        done = end
    return np.concatenate([*pieces, window[done:]]).astype(np.int64), spans


def _is_word(text: str) -> bool:
    """Letters only: nobody learns much from a model that guesses a comma."""
    return text.isalpha() and len(text) > 1


def read_guesses(ids: list[int], scores: Sequence[Tensor], vocabulary: Vocabulary) -> dict[int, str]:
    """What a generated target says for each blank, and what else its first piece might have been.

    Args:
        ids: the target, with its start token.
        scores: float[1, vocabulary] before each of ids[1:].
    """
    number = {int(sentinel): i for i, sentinel in enumerate(vocabulary.sentinel_ids)}
    pieces: dict[int, list[int]] = {}
    others: dict[int, list[str]] = {}
    blank = None
    for token, score in zip(ids[1:], scores, strict=False):
        if token == vocabulary.eos_id:
            break
        if token in number:
            blank = number[token]
            pieces.setdefault(blank, [])
        elif blank is not None:
            if not pieces[blank]:
                likely = [i for i in score[0].topk(NUM_OTHERS + 1).indices.tolist() if i != token]
                others[blank] = [vocabulary.decode([i]) for i in likely[:NUM_OTHERS]]
            pieces[blank].append(token)
    return {
        i: f"{vocabulary.decode(found)} (or: {' | '.join(others[i])})" if found else "(nothing)"
        for i, found in pieces.items()
    }


def _numbered(text: str) -> str:
    for blank in range(NUM_BLANKS):
        text = text.replace(f"<extra_id_{blank}>", f" [{blank + 1}] ")
    return " ".join(text.split())
