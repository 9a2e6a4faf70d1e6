"""Documentation markup -> paragraphs of plain English.

What is kept are sentences. Code, doctests, tables, parameter lists without sentences, headings, licences and
markup go; so does a paragraph that only introduced a piece of code. The rules are crude on purpose: there is far more
documentation on a machine than a corpus of 20 MB needs, so a doubtful paragraph is dropped.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

_FENCED = re.compile(r"(?ms)^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$|<!--.*?-->")
_LITERAL_DIRECTIVE = re.compile(
    r"\.\. (?:code|code-block|sourcecode|highlight|math|image|figure|plot|table|list-table|csv-table|testcode|"
    r"testoutput|doctest|include|literalinclude|toctree|parsed-literal|ipython|only|raw|index|contents|productionlist|_)"
)
_DIRECTIVE = re.compile(r"\.\.(?:\s|$)")
_VERSION = re.compile(r"^\s*(?:\d[\w.]*\s*)?")  # .. versionadded:: 3.2 ...
_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|#\.)\s+")
_FIELD = re.compile(r":(?:param|parameter|arg|type|rtype|returns?|raises|keyword|ivar|cvar|var)\b[^:]*:\s*")
_TYPED_NAME = re.compile(r"[\w`*,. \[\]'\"{}|-]{1,60} :\s")  # numpydoc: "x : array_like"
_NAMED = re.compile(
    r"[`*]*[\w.*]+[`*]*\s?(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\s?:\s+(?=[A-Z`])"
)  # "x (`int`): The ..."
_RULE = re.compile(r"([-=~^\"'#*+_.:`])\1{2,}\s*$")
_TABLE = re.compile(r"\s*(?:\||\+[-=]{2,}|[-=]{2,}\s+[-=]{2,})")
_PROMPT = re.compile(r"\s*(?:>>>|\.\.\. |\$ |% |In \[|Out\[|@[a-z]\w+|#!|import |from \w+ import |def |class \w+[(:])")

# (what the text has to contain, pattern, replacement): the first saves most of the time of the second
_INLINE = [
    ("![", re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),  # images
    ("|", re.compile(r"\|[\w .-]+\|"), ""),  # substitutions
    ("](", re.compile(r"\[([^\]\[]+)\]\([^)\s]*\)"), r"\1"),  # [text](url)
    ("][", re.compile(r"\[([^\]\[]+)\]\[[^\]]*\]"), r"\1"),  # [text][ref]
    (":`", re.compile(r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`"), r"\1"),  # :ref:`text <target>`
    (":`", re.compile(r":[\w:+-]+:`[~!]?(?:[\w.]*\.)?([^`]*)`"), r"\1"),  # :class:`~a.b.C`
    ("[`", re.compile(r"\[`~?([\w.]+)`\]"), r"\1"),  # [`AutoModel`] of transformers' doc builder
    ("`", re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),  # `text <target>`_
    ("`", re.compile(r"``?([^`]+)``?_{0,2}"), r"\1"),
    ("*", re.compile(r"(?<![\w*])\*{1,3}([^*\s][^*]*?)\*{1,3}(?![\w*])"), r"\1"),
    (
        "<",
        re.compile(r"</?(?:p|a|b|i|em|strong|br|div|img|span|h\d|ul|ol|li|code|pre|su[bp]|kbd|t[rdh])\b[^<>]*>"),
        "",
    ),
    ("]", re.compile(r"\[#?[\w*-]*\d[\w*-]*\]_?"), ""),  # [1]_
    ("://", re.compile(r"\s*\(?https?://\S+"), ""),
    ("\\", re.compile(r"\\([^a-zA-Z0-9\s])"), r"\1"),
    ("efault", re.compile(r"\s*\(?[Dd]efaults?(?: value)?(?: is|:| to| =)? [^.;]{1,40}?\)?[.;]?$"), ""),
    (" ", re.compile(r" ([,.;:)])(?=\s|$)"), r"\1"),
]
_BOILERPLATE = re.compile(
    r"copyright|licen[cs]ed?\b|warrant(?:y|ies)|redistribut|all rights reserved|auto-?generated|do not edit|"
    r"documented in|see base class|\bTODO\b|\bFIXME\b",
    re.IGNORECASE,
)
# Each match has one of these in it: looking for them is 7 times as fast as searching for the pattern.
_BOILERPLATE_PARTS = (
    "copyright", "licen", "warrant", "redistribut", "all rights reserved", "generated", "do not edit",
    "documented in", "see base class", "todo", "fixme",
)  # fmt: skip
_CODE = re.compile(r"[{}=<>|\\_@#$%^~/\[\]]|\(\)|\w\.\w")
_WORD = re.compile(r"[A-Za-z]+(?:['’-][a-z]+)*[,.;:!?)\"']*$")
_COMMON = frozenset(
    "a an and are as at be by can for from has have if in into is it its may more no not of on one or other that the "
    "their then there these they this to used uses using was when where which will with you your".split()
)
_SENTENCE_END = (".", "!", "?", '."', ".)", ".'")


def paragraphs(text: str) -> list[str]:
    """The paragraphs of plain prose in a docstring, an .rst, .md or .txt file, each on one line."""
    found = []
    for block in _blocks(_FENCED.sub("\n", text.expandtabs(8))):
        raw = " ".join(block)
        if len(raw) < 40 or raw[0].islower() or raw[0].isdigit():  # never prose: not worth cleaning
            continue
        paragraph = _plain(raw)
        if is_prose(paragraph):
            found.append(paragraph)
    return found


def is_prose(paragraph: str) -> bool:
    """True for whole English sentences of mostly ordinary words."""
    if (
        len(paragraph) < 40
        or not paragraph.endswith(_SENTENCE_END)
        or not (paragraph[0].isupper() or paragraph[0] in "\"'(")
    ):
        return False
    if not paragraph.isprintable() or len(paragraph.encode("ascii", "ignore")) < 0.95 * len(paragraph):
        return False
    words = paragraph.split()
    common = [word for word in words if word in _COMMON]
    return (
        len(words) >= 7
        and len(common) >= 0.15 * len(words)
        and len(set(common)) >= 2
        and sum(map(bool, map(_WORD.match, words))) >= 0.75 * len(words)
        and len(_CODE.findall(paragraph)) <= 0.25 * len(words)
        and not _is_boilerplate(paragraph)
    )


def _is_boilerplate(paragraph: str) -> bool:
    lower = paragraph.lower()
    return any(part in lower for part in _BOILERPLATE_PARTS) and _BOILERPLATE.search(paragraph) is not None


def similarity_key(paragraph: str) -> str:
    """Equal for paragraphs that differ in names and numbers only: boilerplate with another class in it."""
    words = [word.strip(",.;:!?()\"'") for word in paragraph.split()]
    return " ".join(word for word in words[1:] if word.isalpha() and word.islower())


def _plain(paragraph: str) -> str:
    """Markup removed, whitespace folded, and the tail that introduced a piece of code cut off."""
    for needle, pattern, replacement in _INLINE:
        if needle in paragraph:
            paragraph = pattern.sub(replacement, paragraph)
    paragraph = unicodedata.normalize("NFC", " ".join(paragraph.split())).strip(" *`_")
    if paragraph.endswith(":"):
        end = max(paragraph.rfind(stop, 0, -1) for stop in (". ", "? ", "! "))
        paragraph = paragraph[: end + 1]
    return paragraph


@dataclass
class _Reader:
    """Splits lines into paragraphs by blank lines, indentation, bullets and fields; leaves literal blocks out."""

    lines: list[str] = field(default_factory=list)
    indent: int = 0  # of the paragraph's first line
    body: int = -1  # of its other lines; -1 while there is none
    hanging: bool = False  # a bullet or field: its other lines are indented deeper
    literal: int = -1  # lines indented deeper than this are a literal block; -1: none

    def take(self) -> list[str]:
        block, self.lines, self.body, self.hanging = self.lines, [], -1, False
        return block

    def feed(self, line: str) -> Iterator[list[str]]:
        stripped = line.strip()
        if not stripped:
            if self.lines and self.lines[-1].endswith("::"):
                self.literal = self.indent
            yield self.take()
            return
        indent = len(line) - len(line.lstrip())
        if 0 <= self.literal < indent:
            return
        self.literal = -1
        if _RULE.match(stripped):  # the line above was a heading
            self.take()
            return
        if _TABLE.match(line) or _PROMPT.match(line):
            yield self.take()
            return
        if _DIRECTIVE.match(stripped):
            yield self.take()
            if _LITERAL_DIRECTIVE.match(stripped):
                self.literal = indent
            elif "::" in stripped:
                rest = _VERSION.sub("", stripped.partition("::")[2])
                yield from self._open(rest, indent, hanging=True)
            return
        yield from self._text(stripped, indent)

    def _text(self, stripped: str, indent: int) -> Iterator[list[str]]:
        marker = _BULLET.match(stripped) or _FIELD.match(stripped) or _NAMED.match(stripped)
        if _TYPED_NAME.match(stripped) or stripped.startswith("#"):
            yield self.take()
        elif marker:
            rest = stripped[marker.end() :]
            named = _NAMED.match(rest)  # "- **x** (`int`): The ..."
            yield from self._open(rest[named.end() :] if named else rest, indent, hanging=True)
        elif self.lines and self._continues(indent):
            self.lines.append(stripped)
        else:
            yield from self._open(stripped, indent, hanging=False)

    def _continues(self, indent: int) -> bool:
        if self.body < 0 and (indent == self.indent or (self.hanging and indent > self.indent)):
            self.body = indent
        return indent == self.body

    def _open(self, text: str, indent: int, hanging: bool) -> Iterator[list[str]]:
        yield self.take()
        self.lines, self.indent, self.hanging = ([text] if text else []), indent, hanging


def _blocks(text: str) -> Iterator[list[str]]:
    reader = _Reader()
    for line in text.splitlines():
        yield from filter(None, reader.feed(line))
    if last := reader.take():
        yield last
