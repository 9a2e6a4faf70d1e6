"""Held-out text as the model writes it: examples of each validation, and the report at the end of a run (`--report`).

The report has losses before and after, blanks filled in, the curve, the files.
"""

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
    from lm_experiments_tools.recipes.bert_data import BertPretrainingData
    from lm_experiments_tools.recipes.t5_data import PretrainingData
    from lm_experiments_tools.training.trainer import TrainingLoop

NUM_EXAMPLES = 3
WINDOW = 48  # tokens of text in an example
NUM_BLANKS = 2
NUM_OTHERS = 3  # next best first pieces to show
NUM_MEASURED = 400  # one-word blanks that are counted
_MEASURED_AT_ONCE = 100
_PUNCTUATION = ".,;:!?)\"'”’"


def write_report(trainer: TrainingLoop, examples: Sequence[tuple[str, str, str]], share: str | None = None) -> None:
    """Print the report on rank 0 and write it to report.txt and loss.png of the run; every worker calls it.

    `examples` are made by `t5_examples` or `fill_in_masked_words`, `share` by `filled_right`.
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
    """Held-out text as the model generates it, by its `--task`: continued, or with blanks filled in."""
    args = trainer.args
    objective = args.objective()
    if objective.report == "continuation":
        return continued_examples(trainer, data)
    return fill_in_examples(trainer, data, _mode(trainer, data))


def _mode(trainer: TrainingLoop, data: PretrainingData) -> list[int]:
    """Ids in front of an input with blanks: UL2's mode of short spans, where the run has modes."""
    from lm_experiments_tools.data.objectives.ul2 import mode_ids

    has_mode = "mode_tokens" in trainer.args.objective().reads and trainer.args.mode_tokens
    return [mode_ids(data.vocabulary)["R"]] if has_mode else []


def filled_right(trainer: TrainingLoop, data: PretrainingData) -> str | None:
    """The number of one-word blanks in held-out text, of up to 400, that the model fills right; every worker calls it.

    Words are of letters only and drawn at random, each of the held-out text as likely as any other; an input of
    `input_seq_len` tokens has one blank. The answer is generated greedily and has to be the word and no more.
    None for a run that fills no blanks, or whose held-out text is shorter than one input.
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
    """(text of `length` tokens with a sentinel in its middle, the word's pieces) for words at random places.

    Places are drawn and those where no word begins are passed over, so that all words are equally likely.
    """
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
    """Number of pieces of the word of letters that begins here, punctuation behind it left out; 0 if none does."""
    if not vocabulary.starts_word(ids[0]):
        return 0
    end = next((i for i in range(1, len(ids)) if vocabulary.starts_word(ids[i])), len(ids))
    word = vocabulary.decode(ids[:end]).strip().rstrip(_PUNCTUATION)
    if not word.isalpha():
        return 0
    return next((i for i in range(1, end + 1) if vocabulary.decode(ids[:i]).strip() == word), 0)


def _first_blank(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """The text that a generated target, with its start token, has for the first blank."""
    special = set(vocabulary.special_ids)
    begin = 2 if len(ids) > 1 and ids[1] == vocabulary.sentinel_ids[0] else 1
    end = next((i for i in range(begin, len(ids)) if ids[i] in special), len(ids))
    return vocabulary.decode(ids[begin:end]).strip()


class WrittenExamples:
    """The first rows of a validation, shown with what the model writes for them (training.metrics.Collector).

    Args:
        trainer: gives the loop, which is made with the function that makes this.
        number: `--show_valid_examples`.
    """

    def __init__(self, trainer: Callable[[], TrainingLoop], split: str, vocabulary: Vocabulary, number: int) -> None:
        self.trainer, self.split, self.vocabulary, self.number = trainer, split, vocabulary, number
        self.rows: list[tuple[list[int], list[int]]] = []

    def add(self, batch: Mapping[str, Any], outputs: Any) -> None:
        """Keep inputs and targets, without padding, until there are enough."""
        pad = self.vocabulary.pad_id
        for i in range(min(len(batch["labels"]), self.number - len(self.rows))):
            source, target = batch["input_ids"][i].tolist(), batch["labels"][i].tolist()
            self.rows.append(([id for id in source if id != pad], [id for id in target if id >= 0]))

    def reduce(self, backend: Backend) -> dict[str, float]:
        """Show rank 0's rows; every worker writes, as a sharded model needs all of them."""
        trainer, examples = self.trainer(), []
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
    """(the first half of a text, its second half, the model's second half) for a few validation documents."""
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
    """The beginnings of a few documents that are long enough, evenly from all of them, int64[WINDOW] each.

    The index is read twice, block by block: first to count them.
    """

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
    """(text with numbered blanks, the words that stood there, the model's) for a few validation documents.

    `before`: ids put in front of the input.
    """
    vocabulary = data.vocabulary
    examples = []
    for window in _windows(data.valid_tokens):
        inputs, spans = hide_words(window, vocabulary)
        ids = torch.tensor([[*before, *inputs.tolist(), vocabulary.eos_id]], device=trainer.backend.device)
        scored = {"output_scores": True, "return_dict_in_generate": True}
        output = _generate(trainer, ids, max_new_tokens=12 * NUM_BLANKS, **scored)
        guesses = read_guesses(output.sequences[0].tolist(), output.scores, vocabulary)
        examples.append((
            _numbered(vocabulary.decode(inputs.tolist())),
            _in_a_row(vocabulary.decode(span.tolist()) for span in spans),
            _in_a_row(guesses.get(i, "(nothing)") for i in range(len(spans))),
        ))  # fmt: skip
    return examples


def fill_in_masked_words(trainer: TrainingLoop, data: BertPretrainingData) -> list[tuple[str, str, str]]:
    """`fill_in_examples` of a model that fills in masked pieces, each by itself."""
    tokenizer, backend = data.tokenizer, trainer.backend
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
        logits = outputs["prediction_logits" if "prediction_logits" in outputs else "logits"][0, 1:-1]
        examples.append((
            " ".join([*text, tokenizer.decode(window[done:])]),
            _in_a_row(tokenizer.decode(window[begin:end]) for begin, end in words),
            _in_a_row(_best_pieces(logits[begin:end], tokenizer.decode) for begin, end in words),
        ))  # fmt: skip
    return examples


def _best_pieces(logits: Tensor, decode: Callable[[Any], str]) -> str:
    """The likeliest piece for each place of a word, and the next best for the first; logits [pieces, ids]."""
    _, *others = logits[0].topk(NUM_OTHERS + 1).indices.tolist()
    return f"{decode(logits.argmax(-1).tolist())} (or: {' | '.join(decode([i]) for i in others)})"


def _in_a_row(texts: Iterable[str]) -> str:
    return "  ".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))


def _two_words(window: np.ndarray, starts: Sequence[int], decode: Callable[[Any], str]) -> list[tuple[int, int]]:
    """Ranges of the words nearest to one third and two thirds of a token window, in order."""
    words = [(begin, end) for begin, end in pairwise(starts) if _is_word(decode(window[begin:end]))]
    chosen: list[tuple[int, int]] = []
    for blank in range(NUM_BLANKS):
        middle = (blank + 1) * len(window) / (NUM_BLANKS + 1)
        left = [word for word in words if not chosen or word[0] >= chosen[-1][1]]
        chosen += sorted(left, key=lambda word: abs(word[0] - middle))[:1]
    return chosen


def hide_words(window: np.ndarray, vocabulary: Vocabulary) -> tuple[np.ndarray, list[np.ndarray]]:
    """Replace the words nearest to one third and two thirds of a token window by sentinels.

    Returns:
        The window with sentinels, and the hidden pieces in order.
    """
    starts = [i for i in range(len(window)) if vocabulary.starts_word(int(window[i]))]
    pieces, spans, done = [], [], 0
    for blank, (begin, end) in enumerate(_two_words(window, starts, vocabulary.decode)):
        pieces += [window[done:begin], vocabulary.sentinel_ids[blank : blank + 1]]
        spans.append(window[begin:end])
        done = end
    return np.concatenate([*pieces, window[done:]]).astype(np.int64), spans


def _is_word(text: str) -> bool:
    """Letters only: nobody learns much from a model that guesses a comma."""
    return text.strip().isalpha() and len(text.strip()) > 1


def read_guesses(ids: list[int], scores: Sequence[Tensor], vocabulary: Vocabulary) -> dict[int, str]:
    """The text that a generated target has for each blank, and the next best pieces for its first.

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
