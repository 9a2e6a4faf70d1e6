"""Metrics of generated text against one or several references each; the package's docstring has their rules."""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from types import ModuleType
from typing import Any

from lm_experiments_tools.errors import UserError

References = Sequence[Sequence[str]]  # of each example, one or more
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def _optional(module: str, package: str, metric: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"--metrics {metric} is computed by {package}, which is not installed ({error}): pip install {package}."
        ) from None


def check_metrics(names: Sequence[str], bleu_tokenize: str = "13a") -> None:
    """Refuse metrics that give different values of one name, and those whose package is not installed."""
    for first, second, value in DISAGREEING:
        if first in names and second in names:
            raise UserError(
                f"--metrics {first} and --metrics {second} compute {value} by different rules: choose one of them."
            )
    for name in names:
        if name in ("bleu", "chrf"):
            _optional("sacrebleu", "sacrebleu", name)
        elif name in ("rouge", "scrolls", "instructions"):
            _optional("rouge_score.rouge_scorer", "rouge-score", name)
    if "bleu" in names:
        _bleu(bleu_tokenize)


def without_punctuation(text: str) -> str:
    """Lower case, no ASCII punctuation, single spaces: natural-instructions' normalisation."""
    return " ".join(text.lower().translate(PUNCTUATION).split())


def normalized_answer(text: str) -> str:
    """The same, and without the articles a, an and the: SQuAD's normalisation (Rajpurkar et al. 2016)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1_of_tokens(prediction: str, reference: str) -> float:
    """Of words in common, 0 to 1; SQuAD 1.1 gives 0 where both are empty."""
    predicted, wanted = normalized_answer(prediction).split(), normalized_answer(reference).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _mean_of_best(score: Callable[[str, str], float], predictions: Sequence[str], references: References) -> float:
    """Mean over examples of the best score among their references, times 100."""
    best = (max(score(p, r) for r in wanted) for p, wanted in zip(predictions, references, strict=True))
    return 100.0 * sum(best) / len(predictions)


def exact_match(
    predictions: Sequence[str], references: References, normalized: Callable[[str], str] = normalized_answer
) -> dict[str, float]:
    """Percentage of predictions that equal one of their references after normalisation."""
    return {"exact_match": _mean_of_best(lambda p, r: float(normalized(p) == normalized(r)), predictions, references)}


def f1_tokens(predictions: Sequence[str], references: References) -> dict[str, float]:
    """SQuAD's F1 of words, 0 to 100."""
    return {"f1_tokens": _mean_of_best(_f1_of_tokens, predictions, references)}


def _streams(references: References) -> list[tuple[str | None, ...]]:
    """sacrebleu's order: the first references of all examples, the second ones, ...; None where there is none."""
    return list(zip_longest(*references))


def _bleu(tokenize: str) -> Any:
    sacrebleu = _optional("sacrebleu", "sacrebleu", "bleu")
    try:
        return sacrebleu.BLEU(tokenize=tokenize)
    except RuntimeError as error:  # of a package that a tokenizer needs
        raise UserError(
            f"--bleu_tokenize {tokenize} needs packages that are not installed: "
            f"pip install 'sacrebleu[{tokenize.partition('-')[0]}]', or choose char."
        ) from error


def bleu(predictions: Sequence[str], references: References, tokenize: str = "13a") -> dict[str, float]:
    """Corpus BLEU as the sacrebleu command prints it with `--tokenize`, unrounded."""
    return {"bleu": float(_bleu(tokenize).corpus_score(list(predictions), _streams(references)).score)}


def chrf(predictions: Sequence[str], references: References) -> dict[str, float]:
    """Corpus chrF2 as the sacrebleu command prints it, unrounded."""
    sacrebleu = _optional("sacrebleu", "sacrebleu", "chrf")
    return {"chrf": float(sacrebleu.CHRF().corpus_score(list(predictions), _streams(references)).score)}


def _rouge_scorer(kinds: Sequence[str], stem: bool, metric: str) -> Any:
    """rouge-score's scorer, which stems each distinct word once."""
    scorers = _optional("rouge_score.rouge_scorer", "rouge-score", metric)
    tokenizers = _optional("rouge_score.tokenizers", "rouge-score", metric)
    tokenizer = tokenizers.DefaultTokenizer(stem)
    if stem:
        tokenizer._stemmer.stem = lru_cache(maxsize=1 << 16)(tokenizer._stemmer.stem)
    return scorers.RougeScorer(list(kinds), tokenizer=tokenizer)


def rouge_of_examples(
    predictions: Sequence[str], references: References, kinds: Sequence[str], *, stem: bool, metric: str = "rouge"
) -> list[dict[str, float]]:
    """rouge-score's F-measures (0 to 1) of each example, for each kind that of the best reference."""
    scorer = _rouge_scorer(kinds, stem, metric)
    best = (scorer.score_multi(list(wanted), p) for p, wanted in zip(predictions, references, strict=True))
    return [{kind: float(score.fmeasure) for kind, score in scores.items()} for scores in best]


def mean_percent(values: Sequence[float]) -> float:
    """Times 100 after the sum, as the reference scripts do."""
    return 100.0 * sum(values) / len(values)


def rouge(predictions: Sequence[str], references: References) -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum, 0 to 100; lines are the sentences of rougeLsum."""
    kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    scores = rouge_of_examples(predictions, references, kinds, stem=True)
    return {kind: mean_percent([score[kind] for score in scores]) for kind in kinds}


def scrolls(predictions: Sequence[str], references: References) -> dict[str, float]:
    """All values that a SCROLLS task is scored by (Shaham et al. 2022), 0 to 100."""
    kinds = ("rouge1", "rouge2", "rougeL")
    scores = rouge_of_examples(predictions, references, kinds, stem=False, metric="scrolls")
    values = {kind: mean_percent([score[kind] for score in scores]) for kind in kinds}
    values["rouge_geometric_mean"] = (values["rouge1"] * values["rouge2"] * values["rougeL"]) ** (1.0 / 3.0)
    return values | f1_tokens(predictions, references) | exact_match(predictions, references)


METRICS: dict[str, Callable[[Sequence[str], References], dict[str, float]]] = {
    "bleu": bleu,
    "chrf": chrf,
    "rouge": rouge,
    "exact_match": exact_match,
    "f1_tokens": f1_tokens,
    "scrolls": scrolls,
}
# metrics that give a value of one name by different rules
DISAGREEING = (
    ("rouge", "scrolls", "rougeL"),
    ("scrolls", "instructions", "rougeL"),
    ("exact_match", "instructions", "exact_match"),
)
