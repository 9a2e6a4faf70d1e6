"""Metrics of generated text against one or several references each.

ROUGE and SQuAD's metrics are those of their reference implementations, which read Latin script: rouge-score drops all
other letters.
"""

from __future__ import annotations

import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.metrics.metric import TEXT, Metric

if TYPE_CHECKING:
    import numpy as np

References = Sequence[Sequence[str]]  # of each example, one or more
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def without_punctuation(text: str) -> str:
    """Lower-case the text, remove ASCII punctuation and repeated spaces, as natural-instructions does."""
    return " ".join(text.lower().translate(PUNCTUATION).split())


def normalized_answer(text: str) -> str:
    """Normalize an answer as SQuAD does: lower case, no ASCII punctuation, no articles (a, an, the)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1_of_words(prediction: str, reference: str) -> float:
    """Of words in common, 0 to 1; SQuAD 1.1 gives 0 where both are empty."""
    predicted, wanted = prediction.split(), reference.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_scores(
    score: Callable[[str, str], float], rule: Callable[[str], str], predictions: Sequence[str], references: References
) -> list[float]:
    """Best score of each example among its references, all of them normalized by `rule`."""
    return [
        max(float(score(rule(prediction), rule(reference))) for reference in wanted)
        for prediction, wanted in zip(predictions, references, strict=True)
    ]


def exact_match(predictions: Sequence[str], references: References) -> float:
    """Percentage of predictions that equal a reference after `normalized_answer`."""
    return mean_percent(best_scores(operator.eq, normalized_answer, predictions, references))


def f1_tokens(predictions: Sequence[str], references: References) -> float:
    """Mean word F1 of SQuAD 1.1, 0 to 100, with the best reference of each example."""
    return mean_percent(best_scores(_f1_of_words, normalized_answer, predictions, references))


def gen_len(predictions: Sequence[str], references: References, *, num_tokens: np.ndarray) -> float:
    """Mean number of generated tokens, without padding."""
    return int(num_tokens.sum()) / len(num_tokens)


def _streams(references: References) -> list[tuple[str | None, ...]]:
    """sacrebleu's order: the first references of all examples, the second ones, ...; None where there is none."""
    return list(zip_longest(*references))


def bleu_scorer(*, bleu_tokenize: str | None) -> Any:
    """Return sacrebleu's BLEU object. Raises UserError if its tokenizer needs a missing package."""
    import sacrebleu

    try:
        return sacrebleu.BLEU(tokenize=bleu_tokenize or "13a")
    except RuntimeError as error:
        raise UserError(
            f"--bleu_tokenize {bleu_tokenize} needs packages that are not installed: "
            f"pip install 'sacrebleu[{bleu_tokenize.partition('-')[0]}]', or choose char."
        ) from error


def bleu(predictions: Sequence[str], references: References, *, bleu_tokenize: str | None = None) -> float:
    """Corpus BLEU, 0 to 100, as printed by `sacrebleu --tokenize bleu_tokenize`; None: 13a."""
    return float(bleu_scorer(bleu_tokenize=bleu_tokenize).corpus_score(list(predictions), _streams(references)).score)


def chrf(predictions: Sequence[str], references: References) -> float:
    """Corpus chrF2, 0 to 100, as printed by sacrebleu."""
    import sacrebleu

    return float(sacrebleu.CHRF().corpus_score(list(predictions), _streams(references)).score)


def rouge_of_examples(
    predictions: Sequence[str], references: References, kinds: Sequence[str], *, stem: bool
) -> list[dict[str, float]]:
    """Compute ROUGE F-measures, 0 to 1, of each example, with the best reference for each kind ("rouge1", ...)."""
    from rouge_score import rouge_scorer, tokenizers

    tokenizer = tokenizers.DefaultTokenizer(stem)
    if stem:  # each distinct word once
        tokenizer._stemmer.stem = lru_cache(maxsize=1 << 16)(tokenizer._stemmer.stem)
    scorer = rouge_scorer.RougeScorer(list(kinds), tokenizer=tokenizer)
    sides = zip(predictions, references, strict=True)
    best = (scorer.score_multi(list(wanted), prediction) for prediction, wanted in sides)
    return [{kind: float(score.fmeasure) for kind, score in scores.items()} for scores in best]


def mean_percent(values: Sequence[float]) -> float:
    """Return the mean of values between 0 and 1 as a percentage.

    The sum is multiplied by 100 before the division, as in the reference scripts.
    """
    return 100.0 * sum(values) / len(values)


def rouge(predictions: Sequence[str], references: References) -> dict[str, float]:
    """Mean ROUGE-1, -2, -L and -Lsum, 0 to 100, with stemmer and the best reference for each value.

    This is the ROUGE of Hugging Face's example scripts without bootstrap. For rougeLsum, each line is a sentence.
    """
    scores = rouge_of_examples(predictions, references, _ROUGE, stem=True)
    return {kind: mean_percent([score[kind] for score in scores]) for kind in _ROUGE}


def scrolls(predictions: Sequence[str], references: References) -> dict[str, float]:
    """Compute the metrics of the SCROLLS benchmark (Shaham et al. 2022), 0 to 100.

    These are ROUGE without stemmer, the geometric mean of the mean ROUGE-1, -2 and -L, F1 and exact match.
    """
    kinds = _ROUGE[:3]
    scores = rouge_of_examples(predictions, references, kinds, stem=False)
    values = {kind: mean_percent([score[kind] for score in scores]) for kind in kinds}
    values["rouge_geometric_mean"] = (values["rouge1"] * values["rouge2"] * values["rougeL"]) ** (1.0 / 3.0)
    return {
        **values,
        "f1_tokens": f1_tokens(predictions, references),
        "exact_match": exact_match(predictions, references),
    }


_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ROUGE_SCORE = {"package": "rouge-score", "module": "rouge_score.rouge_scorer"}
SACREBLEU = {"package": "sacrebleu", "module": "sacrebleu"}
METRICS = {
    "bleu": Metric(function=bleu, tasks=TEXT, scale="0-100", prepare=bleu_scorer, **SACREBLEU),
    "chrf": Metric(function=chrf, tasks=TEXT, scale="0-100", **SACREBLEU),
    "rouge": Metric(
        function=rouge, tasks=TEXT, scale="0-100", values=_ROUGE, usual_for=("text_to_text",), **ROUGE_SCORE
    ),
    "exact_match": Metric(function=exact_match, tasks=TEXT, scale="0-100"),
    "f1_tokens": Metric(function=f1_tokens, tasks=TEXT, scale="0-100"),
    "gen_len": Metric(function=gen_len, tasks=TEXT, scale="tokens", usual_for=TEXT, needs_references=False),
    "scrolls": Metric(
        function=scrolls,
        tasks=TEXT,
        scale="0-100",
        values=(*_ROUGE[:3], "rouge_geometric_mean", "f1_tokens", "exact_match"),
        disagrees=("rouge",),
        writes_by_id=True,
        **ROUGE_SCORE,
    ),
}
