"""Metrics of generated text against one or several references each.

The reference implementations read Latin script only: rouge-score drops all other letters, SQuAD's normalization keeps
other punctuation. Examples whose references are in another script are therefore split by `words_of`.
"""

from __future__ import annotations

import logging
import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain, zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.metrics.metric import TEXT, Metric

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

References = Sequence[Sequence[str]]  # of each example, one or more
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
# Letters of scripts that put no spaces between words: Thai and Lao, Burmese, Khmer, Japanese, Chinese.
UNSPACED = re.compile(
    r"[\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


def without_punctuation(text: str) -> str:
    """Lower-case the text, remove ASCII punctuation and repeated spaces, as natural-instructions does."""
    return " ".join(text.lower().translate(PUNCTUATION).split())


def normalized_answer(text: str) -> str:
    """Normalize an answer as SQuAD does: lower case, no ASCII punctuation, no articles (a, an, the)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def words_of(text: str) -> list[str]:
    """Split a text of any script into lower-case words, without punctuation and after Unicode's NFKC.

    In scripts without spaces between words (`UNSPACED`), each character is a word.
    """
    return "".join(map(_spaced, unicodedata.normalize("NFKC", text).lower())).split()


@lru_cache(maxsize=1 << 16)
def _spaced(character: str) -> str:
    if character in string.punctuation or unicodedata.category(character)[0] in "PZC":
        return " "
    return f" {character} " if UNSPACED.match(character) else character


@lru_cache(maxsize=1 << 16)
def _is_foreign(word: str) -> bool:
    """True for a word without ASCII or Latin characters; rouge-score drops it."""
    return not any(c.isascii() or unicodedata.name(c, "").startswith("LATIN") for c in word)


def in_other_script(texts: Iterable[str]) -> bool:
    """Return True if at least a quarter of the words are in other scripts than Latin.

    Greek letters in the formulas of an English text are fewer, and stay dropped as by rouge-score.
    """
    return _are_many(_is_foreign, texts)


def _are_many(kind: Callable[[str], Any], texts: Iterable[str]) -> bool:
    """True if `kind` holds for at least a quarter of the words; it is not asked about ASCII words."""
    found = total = 0
    for text in texts:
        words = text.split() if text.isascii() else words_of(text)
        found, total = found + sum(1 for word in words if not word.isascii() and kind(word)), total + len(words)
    return 4 * found >= total > 0


_say_once = lru_cache(logger.info)


def _f1_of_words(prediction: str, reference: str) -> float:
    """Of words in common, 0 to 1; SQuAD 1.1 gives 0 where both are empty."""
    predicted, wanted = prediction.split(), reference.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_scores(
    score: Callable[[str, str], float], latin: Callable[[str], str], predictions: Sequence[str], references: References
) -> list[float]:
    """Best score of each example among its references; `latin` normalizes texts in Latin script, `words_of` others."""
    scores = []
    for prediction, wanted in zip(predictions, references, strict=True):
        rule = (lambda text: " ".join(words_of(text))) if in_other_script(wanted) else latin
        scores.append(max(float(score(rule(prediction), rule(reference))) for reference in wanted))
    return scores


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


def bleu_tokenizer(references: References) -> str:
    """Return the name of sacrebleu's tokenizer for the script of the references.

    It is 13a, which splits at spaces. If at least a quarter of the words are characters of scripts without spaces, it
    is zh for Chinese and char for others.
    """
    texts = [*chain.from_iterable(references)]
    if not _are_many(UNSPACED.match, texts):
        return "13a"
    unspaced = [character for text in texts for character in UNSPACED.findall(text)]
    chinese = sum(unicodedata.name(character, "").startswith("CJK") for character in unspaced)
    return "zh" if chinese > 0.9 * len(unspaced) else "char"


def bleu(predictions: Sequence[str], references: References, *, bleu_tokenize: str | None = None) -> float:
    """Corpus BLEU, 0 to 100, as printed by `sacrebleu --tokenize bleu_tokenize`; None: see `bleu_tokenizer`."""
    if bleu_tokenize is None and (bleu_tokenize := bleu_tokenizer(references)) != "13a":
        _say_once(f"bleu: --bleu_tokenize {bleu_tokenize}, because the references are in a script without spaces")
    scorer = bleu_scorer(bleu_tokenize=bleu_tokenize)
    return float(scorer.corpus_score(list(predictions), _streams(references)).score)


def chrf(predictions: Sequence[str], references: References) -> float:
    """Corpus chrF2, 0 to 100, as printed by sacrebleu."""
    import sacrebleu

    return float(sacrebleu.CHRF().corpus_score(list(predictions), _streams(references)).score)


def rouge_of_examples(
    predictions: Sequence[str], references: References, kinds: Sequence[str], *, stem: bool
) -> list[dict[str, float]]:
    """Compute ROUGE F-measures, 0 to 1, of each example, with the best reference for each kind.

    Args:
        kinds: such as "rouge1" and "rougeL".
        stem: use rouge-score's stemmer.
    """
    from rouge_score import rouge_scorer, tokenizers

    latin = tokenizers.DefaultTokenizer(stem)
    if stem:  # each distinct word once
        latin._stemmer.stem = lru_cache(maxsize=1 << 16)(latin._stemmer.stem)

    def any_script(text: str) -> list[str]:
        return [token for word in words_of(text) for token in (latin.tokenize(word) if word.isascii() else [word])]

    both = (latin, SimpleNamespace(tokenize=any_script))
    scorers = [rouge_scorer.RougeScorer(list(kinds), tokenizer=tokenizer) for tokenizer in both]
    sides = zip(map(in_other_script, references), predictions, references, strict=True)
    best = (scorers[is_other].score_multi(list(wanted), prediction) for is_other, prediction, wanted in sides)
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
