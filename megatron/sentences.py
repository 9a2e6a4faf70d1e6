r"""Split text into sentences. The text is not changed, except that white space around sentences is dropped.

| `--sentence-splitter` | splits |
|---|---|
| `nupunkt` | English, with a trained Punkt model as nltk's; a newline is a space |
| `sentencex`, `sentencex:de` | 300 languages (two-letter code, English by default); a blank line ends a sentence |
| `newline` | each line is a sentence |
| `module:callable` | a function from a text to a list of its sentences |

Line breaks inside a sentence are kept. Example: with `nupunkt`, the text "One. Two\ngoes on.\n\nThree" gives
["One.", "Two\ngoes on.", "Three"], and with keep_newlines ["One. ", "Two\ngoes on.\n\n", "Three"].
"""

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import resolve_name


class SentenceSplitter:
    """Function object that splits a text into a list of sentences. No sentence is blank.

    Args:
        name: value of `--sentence-splitter`, such as "nupunkt".
        keep_newlines: keep the white space around sentences, so that the joined sentences are the text.

    Raises:
        UserError: the splitter does not exist, is not installed, fails, or changes the text.
    """

    def __init__(self, name: str = "nupunkt", keep_newlines: bool = False):
        self.name = name
        self.keep_newlines = keep_newlines
        self._starts = _build(name)

    def __call__(self, text: str) -> list[str]:
        spans = self.spans(text)
        if self.keep_newlines:
            return [text[start:end] for start, end in spans]
        return [text[start:end].strip() for start, end in spans]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the position (start, end) of each sentence in a text, with the white space after it.

        The spans cover the text without gaps.
        """
        spans: list[tuple[int, int]] = []
        start = 0
        for end in (*self._starts(text), len(text)):
            if text[start:end].strip():
                spans.append((start, end))
                start = end
            elif spans:  # white space alone belongs to the sentence before it, at the beginning to the one after it
                spans[-1] = (spans[-1][0], end)
                start = end
        return spans


# A splitter of this module is a function text -> where its sentences start, in increasing order.


def _nupunkt() -> Callable[[str], Iterable[int]]:
    try:
        from nupunkt import sent_spans
    except ImportError:
        raise UserError("--sentence-splitter nupunkt needs: pip install nupunkt (Python 3.11 or newer)") from None
    return lambda text: [start for start, _ in sent_spans(text)]


def _sentencex(language: str = "en") -> Callable[[str], Iterable[int]]:
    try:
        from sentencex import segment
    except ImportError:
        raise UserError("--sentence-splitter sentencex needs the sentencex package: pip install sentencex") from None

    def starts(text: str) -> Iterator[int]:
        try:
            sentences = segment(language, text)
        except BaseException as error:
            # A BaseException without an importable name; 1.0.32 panics where wide white space follows an initial.
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(f"--sentence-splitter sentencex fails on the text: {error}") from None
        return _locate(text, sentences, "sentencex")

    return starts


def _newline(text: str) -> Iterator[int]:
    return (match.end() for match in re.finditer("\n", text))


_BUILDERS = {"nupunkt": _nupunkt, "sentencex": _sentencex, "newline": lambda: _newline}


def _build(name: str) -> Callable[[str], Iterable[int]]:
    module_name, _, path = name.partition(":")
    if name in _BUILDERS:
        return _BUILDERS[name]()
    if module_name == "sentencex" and path:
        return _sentencex(path)
    if not (module_name and path):
        raise UserError(f"--sentence-splitter {name} is neither {', '.join(_BUILDERS)} nor module:callable")
    split = resolve_name(name, said=f"--sentence-splitter {name}")
    return lambda text: _locate(text, split(text), name)


def _locate(text: str, sentences: Iterable[str], name: str) -> Iterator[int]:
    """Start of each sentence in the text; UserError if they are not the text up to white space."""
    end = 0
    for number, sentence in enumerate(sentences, 1):
        if not isinstance(sentence, str):
            raise UserError(f"--sentence-splitter {name} returned a {type(sentence).__name__} as a sentence")
        start = text.find(sentence, end)
        if start < 0 or text[end:start].strip():
            raise UserError(
                f"--sentence-splitter {name} changed the text: its sentence {number}, {sentence[:60]!r}, does not "
                f"follow {text[:end][-60:]!r}"
            )
        yield start
        end = start + len(sentence)
    if text[end:].strip():
        raise UserError(f"--sentence-splitter {name} lost the end of a text: {text[end:].strip()[:60]!r}")


def splitter_version(name: str) -> str:
    """Return the version of a sentence splitter: that of its package, or a hash of the user's file that defines it."""
    package = name.partition(":")[0]
    if package == "newline":
        return ""
    if package in _BUILDERS:
        return importlib.metadata.version(package)
    resolve_name(name, said=f"--sentence-splitter {name}")
    source = getattr(sys.modules[package], "__file__", None)
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
