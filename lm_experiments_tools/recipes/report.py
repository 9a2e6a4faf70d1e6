"""Generate text for held-out examples, at each validation and for the final `--report`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.tracking.curve import plot_curve
from lm_experiments_tools.tracking.examples import show_examples

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.data.text.vocabulary import Vocabulary
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset
    from lm_experiments_tools.recipes.common import PretrainingData
    from lm_experiments_tools.training.trainer import TrainingLoop

NUM_EXAMPLES = 3
WINDOW = 48  # tokens of text in an example
NUM_BLANKS = 2
NUM_MEASURED = 400  # one-word blanks that are counted
_MEASURED_AT_ONCE = 100
_PUNCTUATION = ".,;:!?)\"'”’"


def write_report(trainer: TrainingLoop, examples: Sequence[tuple[str, str, str]], share: str | None = None) -> None:
    """Print the report on rank 0 and write report.txt and loss.png to the run directory.

    Args:
        examples: (text, expected, generated), returned by `t5_examples` or `fill_in_masked_words`.
        share: accuracy as text, returned by `filled_right`.
    """
    if not trainer.backend.is_main:
        return
    folder, metrics = Path(trainer.args.model_path), trainer.state.metrics
    start = metrics.get("start")
    before = f"{start['loss']:.3f} before training, " if start else ""
    lines = [f"Loss on held-out text: {before}{metrics['valid']['loss']:.3f} after {trainer.state.step} steps"]
    lines += [share] if share else []
    for number, (text, truth, guess) in enumerate(examples, start=1):
        lines += ["", f"Held-out text {number}:", f"  {text}", f"  true:  {truth}", f"  model: {guess}"]
    curve = plot_curve(folder / "metrics.jsonl", folder / "loss.png")
    lines += ["", f"Loss curve:  {curve}", f"TensorBoard: tensorboard --logdir {folder}"]
    lines += [f"Checkpoint:  {folder / 'last'} (loads with from_pretrained)"]
    text = "\n".join(lines)
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    print("\n" + text, flush=True)


def t5_examples(trainer: TrainingLoop, data: PretrainingData) -> list[tuple[str, str, str]]:
    """Continue held-out texts or fill in their blanks, depending on `--task`. Every worker must call it."""
    if trainer.args.objective().report == "continuation":
        return continued_examples(trainer, data)
    return fill_in_examples(trainer, data, _mode(trainer, data))


def _mode(trainer: TrainingLoop, data: PretrainingData) -> list[int]:
    """Ids before an input with blanks: UL2's mode of short spans, if the run has modes."""
    from lm_experiments_tools.data.objectives.ul2 import mode_ids

    has_mode = "mode_tokens" in trainer.args.objective().reads and trainer.args.mode_tokens
    return [mode_ids(data.vocabulary)["R"]] if has_mode else []


def filled_right(trainer: TrainingLoop, data: PretrainingData) -> str | None:
    """Measure how often the model fills a one-word blank exactly, on up to 400 held-out texts.

    Each input of `input_seq_len` tokens has one blank at a random word; decoding is greedy. Every worker must call it.

    Returns:
        The accuracy as text; None if the objective fills no blanks or the held-out text is too short.
    """
    vocabulary, args = data.vocabulary, trainer.args
    if args.objective().report == "continuation":
        return None
    before = _mode(trainer, data)
    blanks = _one_word_blanks(data.valid_tokens, vocabulary, args.input_seq_len - len(before) - 1)
    if not blanks:
        return None
    right, words = 0, Counter(vocabulary.decode(word).strip() for _, word in blanks)
    for start in range(0, len(blanks), _MEASURED_AT_ONCE):
        batch = blanks[start : start + _MEASURED_AT_ONCE]
        ids = torch.tensor([[*before, *text, vocabulary.eos_id] for text, _ in batch], device=trainer.backend.device)
        longest = max(len(word) for _, word in batch)
        output = _generate(trainer, ids, max_new_tokens=longest + 2)  # the sentinel before it, the one that ends it
        right += sum(
            _first_blank(answer, vocabulary) == vocabulary.decode(word).strip()
            for answer, (_, word) in zip(output.tolist(), batch, strict=True)
        )
    (commonest, count), total = words.most_common(1)[0], len(blanks)
    return (
        f"{right} of {total} one-word blanks in held-out text are filled right ({right / total:.1%}); "
        f'always "{commonest}" would be right in {count} ({count / total:.1%})'
    )


def _one_word_blanks(tokens: IndexedDataset, vocabulary: Vocabulary, length: int) -> list[tuple[list[int], list[int]]]:
    """(text of `length` tokens with a sentinel in its middle, the word's subwords) for words at random positions."""
    size, half, blanks = len(tokens.tokens), length // 2, []
    places = range(half, size - length)  # room on both sides
    for place in random.Random(0).sample(places, min(len(places), 20 * NUM_MEASURED)):
        text = np.asarray(tokens.tokens[place - half : place + length], dtype=np.int64).tolist()
        if pieces := _word_at(text[half:], vocabulary):
            after = text[half + pieces :]
            blanks.append(
                ([*text[:half], int(vocabulary.sentinel_ids[0]), *after][:length], text[half : half + pieces])
            )
        if len(blanks) == NUM_MEASURED:
            break
    return blanks


def _word_at(ids: list[int], vocabulary: Vocabulary) -> int:
    """Number of subwords of the word of letters that begins here, without punctuation; 0 if none begins."""
    if not vocabulary.starts_word(ids[0]):
        return 0
    end = next((i for i in range(1, len(ids)) if vocabulary.starts_word(ids[i])), len(ids))
    word = vocabulary.decode(ids[:end]).strip().rstrip(_PUNCTUATION)
    if not word.isalpha():
        return 0
    return next((i for i in range(1, end + 1) if vocabulary.decode(ids[:i]).strip() == word), 0)


def _first_blank(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """The text for the first blank in a generated target with its start token."""
    special = set(vocabulary.special_ids)
    begin = 2 if len(ids) > 1 and ids[1] == vocabulary.sentinel_ids[0] else 1
    end = next((i for i in range(begin, len(ids)) if ids[i] in special), len(ids))
    return vocabulary.decode(ids[begin:end]).strip()


class WrittenExamples:
    """Show the first `number` validation rows with the text that the model generates for them."""

    def __init__(self, trainer: TrainingLoop, split: str, vocabulary: Vocabulary, number: int) -> None:
        self.trainer, self.split, self.vocabulary, self.number = trainer, split, vocabulary, number
        self.rows: list[tuple[list[int], list[int]]] = []

    def add(self, batch: Mapping[str, Any], outputs: Any) -> None:
        """Store the inputs and targets of a batch without padding."""
        pad = self.vocabulary.pad_id
        for i in range(min(len(batch["labels"]), self.number - len(self.rows))):
            source, target = batch["input_ids"][i].tolist(), batch["labels"][i].tolist()
            self.rows.append(([id for id in source if id != pad], [id for id in target if id >= 0]))

    def reduce(self, backend: Backend) -> dict[str, float]:
        """Generate and show the outputs for rank 0's rows. Every worker must call it. Returns no metrics."""
        trainer, examples = self.trainer, []
        for number, (source, target) in enumerate(backend.broadcast(self.rows)):
            ids = torch.tensor([source], device=backend.device)
            written = _generate(trainer, ids, max_new_tokens=len(target) + 1)[0, 1:].tolist()
            end = written.index(self.vocabulary.eos_id) if self.vocabulary.eos_id in written else len(written)
            texts = {"input": source, "target": target, "prediction": written[:end]}
            examples.append({"id": number, **{name: self.vocabulary.decode(ids) for name, ids in texts.items()}})
        if backend.is_main:
            show_examples(self.split, examples, trainer.tracker, trainer.state.step)
        return {}


def continued_examples(trainer: TrainingLoop, data: PretrainingData) -> list[tuple[str, str, str]]:
    """Return (first half, second half, the model's continuation) of a few validation documents."""
    vocabulary, half = data.vocabulary, WINDOW // 2
    examples = []
    for window in _windows(data.valid_tokens):
        ids = torch.from_numpy(window[:half])[None].to(trainer.backend.device)
        eos, given, options = ids.new_tensor([[vocabulary.eos_id]]), ids, {}
        if trainer.has_decoder and trainer.args.objective().has_targets:
            given = torch.cat([ids, eos], dim=1)
        elif trainer.has_decoder:  # causal LM has an input of nothing but EOS
            start = ids.new_tensor([[trainer.backend.unwrap().config.decoder_start_token_id]])
            given, options = eos, {"decoder_input_ids": torch.cat([start, ids], dim=1)}
        read = 1 + half if options else (1 if trainer.has_decoder else half)  # what the output repeats
        special_ids = {"pad_token_id": vocabulary.pad_id, "eos_token_id": vocabulary.eos_id}
        output = _generate(trainer, given, max_new_tokens=half, **special_ids, **options)
        texts = (window[:half], window[half:], output[0, read:])
        examples.append(tuple(" ".join(vocabulary.decode(text.tolist()).split()) for text in texts))
    return examples


def _generate(trainer: TrainingLoop, input_ids: Tensor, **options: Any) -> Any:
    """Greedy generation by the trained model."""
    backend = trainer.backend
    model = backend.unwrap().eval()
    with torch.no_grad():
        if backend.shards_model:  # FSDP gathers what generate reads in a forward pass of the whole
            backend.model(input_ids=input_ids, labels=input_ids)
        return model.generate(input_ids, do_sample=False, synced_gpus=backend.shards_model, **options)


def _windows(tokens: IndexedDataset) -> list[np.ndarray]:
    """The beginnings of a few documents that are long enough, evenly spaced, int64[WINDOW] each."""

    def long_documents() -> Iterator[np.ndarray]:
        for bounds in map(tokens.offsets, tokens.document_bounds()):
            yield bounds[:-1][np.diff(bounds) >= WINDOW]

    count, before = sum(map(len, long_documents())), 0
    wanted, chosen = np.linspace(0, max(count - 1, 0), NUM_EXAMPLES).astype(int), []
    for starts in long_documents():
        here = wanted[(wanted >= before) & (wanted < before + len(starts))]
        chosen += starts[here - before].tolist()
        before += len(starts)
    return [np.asarray(tokens.tokens[start : start + WINDOW], dtype=np.int64) for start in chosen]


def fill_in_examples(
    trainer: TrainingLoop, data: PretrainingData, before: Sequence[int] = ()
) -> list[tuple[str, str, str]]:
    """Return (text with numbered blanks, hidden words, the model's words) for a few validation documents.

    Args:
        before: token ids to put before each input, such as a mode token of UL2.
    """
    vocabulary = data.vocabulary
    examples = []
    for window in _windows(data.valid_tokens):
        inputs, spans = hide_words(window, vocabulary)
        ids = torch.tensor([[*before, *inputs.tolist(), vocabulary.eos_id]], device=trainer.backend.device)
        output = _generate(trainer, ids, max_new_tokens=12 * NUM_BLANKS)
        guesses = read_guesses(output[0].tolist(), vocabulary)
        text = vocabulary.decode(inputs.tolist())
        for blank in range(NUM_BLANKS):
            text = text.replace(f"<extra_id_{blank}>", f" [{blank + 1}] ")
        truths = _in_a_row(vocabulary.decode(span.tolist()) for span in spans)
        answers = _in_a_row(guesses.get(i, "(nothing)") for i in range(len(spans)))
        examples.append((" ".join(text.split()), truths, answers))
    return examples


def fill_in_masked_words(trainer: TrainingLoop, data: PretrainingData) -> list[tuple[str, str, str]]:
    """Return the same examples as `fill_in_examples` for a masked language model, which predicts each subword."""
    tokenizer, backend = data.vocabulary, trainer.backend
    backend.model.eval()
    examples = []
    for window in _windows(data.valid_tokens):
        words = _two_words(window, np.flatnonzero(tokenizer.starts_word[window]), tokenizer.decode)
        masked, text, done = window.copy(), [], 0
        for number, (begin, end) in enumerate(words, start=1):
            masked[begin:end] = tokenizer.mask
            text += [tokenizer.decode(window[done:begin]), f"[{number}]"]
            done = end
        ids = torch.tensor([[tokenizer.cls, *masked, tokenizer.sep]], device=backend.device)
        with torch.no_grad():
            outputs = backend.model(input_ids=ids)
        best = outputs["prediction_logits" if "prediction_logits" in outputs else "logits"][0, 1:-1].argmax(-1)
        truths = _in_a_row(tokenizer.decode(window[begin:end]) for begin, end in words)
        answers = _in_a_row(tokenizer.decode(best[begin:end].tolist()) for begin, end in words)
        examples.append((" ".join([*text, tokenizer.decode(window[done:])]), truths, answers))
    return examples


def _in_a_row(texts: Iterable[str]) -> str:
    return "  ".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))


def _two_words(window: np.ndarray, starts: Sequence[int], decode: Callable[[Any], str]) -> list[tuple[int, int]]:
    """Ranges of the words nearest to one third and two thirds of a token window, in order."""
    texts = ((begin, end, decode(window[begin:end]).strip()) for begin, end in pairwise(starts))
    words = [(begin, end) for begin, end, text in texts if text.isalpha() and len(text) > 1]
    chosen: list[tuple[int, int]] = []
    for blank in range(NUM_BLANKS):
        middle = (blank + 1) * len(window) / (NUM_BLANKS + 1)
        left = [word for word in words if not chosen or word[0] >= chosen[-1][1]]
        chosen += sorted(left, key=lambda word: abs(word[0] - middle))[:1]
    return chosen


def hide_words(window: np.ndarray, vocabulary: Vocabulary) -> tuple[np.ndarray, list[np.ndarray]]:
    """Replace the words nearest to one and two thirds of a text by sentinels.

    Args:
        window: int64[length], token ids.

    Returns:
        The ids with sentinels, and the ids of the two hidden words.
    """
    starts = [i for i in range(len(window)) if vocabulary.starts_word(int(window[i]))]
    pieces, spans, done = [], [], 0
    for blank, (begin, end) in enumerate(_two_words(window, starts, vocabulary.decode)):
        pieces += [window[done:begin], vocabulary.sentinel_ids[blank : blank + 1]]
        spans.append(window[begin:end])
        done = end
    return np.concatenate([*pieces, window[done:]]).astype(np.int64), spans


def read_guesses(ids: list[int], vocabulary: Vocabulary) -> dict[int, str]:
    """Split a generated target into the text of each blank, by the blank's index."""
    number = {int(sentinel): i for i, sentinel in enumerate(vocabulary.sentinel_ids)}
    subwords: dict[int, list[int]] = {}
    blank = None
    for token in ids[1:]:
        if token == vocabulary.eos_id:
            break
        if token in number:
            blank = number[token]
            subwords.setdefault(blank, [])
        elif blank is not None:
            subwords[blank].append(token)
    return {i: vocabulary.decode(found) if found else "(nothing)" for i, found in subwords.items()}
