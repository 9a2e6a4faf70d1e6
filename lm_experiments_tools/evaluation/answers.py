"""Read a label or a number from generated text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.metrics.labels import UNKNOWN
from lm_experiments_tools.metrics.text import normalized_answer, without_punctuation

INVALID_NUMBER = -1.0  # what T5's string_to_float gives for a text that is no number


class LabelWords:
    """Maps text that a model generated for a classification task to the index of a label.

    The text is compared with the labels' words exactly, then without case and punctuation, then without articles
    (SQuAD's normalization). A normalization is not used for labels that it makes empty or equal.
    """

    LEVELS = (str.strip, without_punctuation, normalized_answer)

    def __init__(self, words: Sequence[str]) -> None:
        twice = [word for word, count in Counter(map(str.strip, words)).items() if count > 1]
        if twice:
            raise UserError(
                f"the label word {twice[0]!r} stands for several labels: give each --label_words of its own."
            )
        self.tables: list[dict[str, int]] = []
        for level in self.LEVELS:
            forms = [level(word) for word in words]
            unique = {form for form, count in Counter(forms).items() if count == 1 and form}
            self.tables.append({form: number for number, form in enumerate(forms) if form in unique})

    def __call__(self, answer: str) -> int:
        """Return the label's index, or UNKNOWN."""
        for level, table in zip(self.LEVELS, self.tables, strict=True):
            number = table.get(level(answer))
            if number is not None:
                return number
        return UNKNOWN


def number_in(answer: str) -> float | None:
    """Parse generated text as a finite number, for regression tasks; None if it is none."""
    try:
        number = float(answer)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
