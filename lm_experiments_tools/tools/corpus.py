"""Build a text corpus from the documentation of this Python installation; no network is used.

    lmtools corpus --output my_text

Sources are the topics of `pydoc_data`, the docstrings of the standard library and of installed packages (parsed, not
imported), and .rst and .md documents. Only paragraphs of plain English prose are used, without near-duplicates. The
result is deterministic for a given installation.
"""

import ast
import inspect
import json
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import write_atomic
from lm_experiments_tools.tracking.progress import make_bar

SHORTEST, LONGEST = 300, 3000  # characters of a document; about 700 tokens are more than a training example
VALIDATION_SHARE = 0.03  # of files, each whole
RUN_WORDS, MAX_KNOWN = 8, 0.2  # a paragraph is dropped if this fraction of its 8-word runs was seen before
SKIPPED = re.compile(
    r"\.|_?vendor|(__pycache__|tests?|testing|idle_test|third_party|site-packages|lib2to3|node_modules|benchmarks|"
    r"lm_experiments_tools)$|licen[cs]e|copying|notice|author|third",
    re.IGNORECASE,
)

# Markup of lines, then of paragraphs.
_FENCED = re.compile(r"(?ms)^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$|<!--.*?-->")
_NAME = r"[`*]*[\w.*]+[`*]*\s?(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?\s?:\s+(?=[A-Z`])"  # "x (`int`): The ..."
_NOTE = r"\.\. (?:note|warning|tip|seealso|important|version\w+|deprecated)::\s*(?:\d[\w.]*\s*)?"
_ITEM = re.compile(rf"{_NOTE}|(?:[-*+•]|\(?\d{{1,2}}[.)]|#\.)\s+(?:{_NAME})?|:\w+\b[^:]*:\s*(?=[A-Z])|{_NAME}")
_RULE = re.compile(r"([-=~^\"'#*+_.:`])\1{2,}$")  # below a heading
_NO_TEXT = re.compile(
    r"\.\.|[|#]|\+[-=]{2}|[-=]{2,}\s+[-=]{2}|>>>|[$%] |In \[|Out\[|@[a-z]\w|import |from \w+ import |def |"
    r"class \w+[(:]|[\w`*,. \[\]'\"{}|-]{1,60} :\s"  # the last is numpydoc's "x : array_like"
)
_INLINE = [
    (re.compile(r"!\[[^\]]*\]\([^)]*\)|\|[\w .-]+\||</?[a-z]\w{0,6}\b[^<>]*>|\[#?[\w*-]*\d[\w*-]*\]_?"), ""),
    (re.compile(r"\[([^\]\[]+)\](?:\([^)\s]*\)|\[[^\]]*\])"), r"\1"),  # [text](url), [text][reference]
    (re.compile(r"(?::[\w:+-]+:)?`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),  # :ref:`text <target>`
    (re.compile(r":[\w:+-]+:`[~!]?(?:[\w.]*\.)?([^`]*)`|\[`~?([\w.]+)`\]|``?([^`]+)``?_{0,2}"), r"\1\2\3"),
    (re.compile(r"(?<![\w*])\*{1,3}([^*\s][^*]*?)\*{1,3}(?![\w*])"), r"\1"),
    (re.compile(r"\s*\(?https?://\S+|\\(?=[^a-zA-Z0-9\s])|\s*\(?[Dd]efaults?(?: to|:)? [^.;]{1,40}?\)?[.;]?$"), ""),
    (re.compile(r" ([,.;:)])(?=\s|$)"), r"\1"),
]
_BOILERPLATE = re.compile(
    r"copyright|licen[cs]ed?\b|warrant(?:y|ies)|redistribut|all rights reserved|auto-?generated|do not edit|"
    r"documented in|see base class|\btodo\b|\bfixme\b"
)
_SYMBOL = re.compile(r"[{}=<>|\\_@#$%^~/\[\]]|\(\)|\w\.\w")
_WORD = re.compile(r"[A-Za-z]+(?:['’-][a-z]+)*[,.;:!?)\"']*$")
_COMMON = frozenset(
    "a an and are as at be by can for from has have if in into is it its may more no not of on one or other that the "
    "their then there these they this to used uses using was when where which will with you your".split()
)


@dataclass(frozen=True, kw_only=True)
class CorpusArgs:
    """Where to write the text, and how much of it."""

    output: str
    """Folder for train.jsonl and valid.jsonl."""
    max_megabytes: float = 20.0
    """Stop at this much text; a small installation holds less."""


def run(args: CorpusArgs) -> None:
    """Write the corpus to valid.jsonl and train.jsonl, and print their sizes. Raises UserError."""
    paths = {split: Path(args.output, f"{split}.jsonl") for split in ("valid", "train")}
    for path in paths.values():
        if path.exists() and not path.read_bytes().startswith(b'{"source": '):
            raise UserError(f"{path} was not made by `lmtools corpus`; give another folder")
    rows: dict[str, list[dict[str, str]]] = {"valid": [], "train": []}
    for row in _documents(int(args.max_megabytes * 1e6)):
        # By a hash of the file's name (not the one of the order): more packages move no file to the other split.
        is_valid = zlib.crc32(row["source"][::-1].encode()) < VALIDATION_SHARE * 2**32
        rows["valid" if is_valid else "train"].append(row)
    if not all(rows.values()):
        raise UserError(f"{sysconfig.get_path('stdlib')} holds too little documentation: use text of your own")
    paths["train"].unlink(missing_ok=True)  # it exists only next to the valid.jsonl made with it
    for split, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[split]))
        print(f"{path}: {len(rows[split]):,} documents, {path.stat().st_size / 1e6:.1f} MB")


def _documents(max_bytes: int) -> Iterator[dict[str, str]]:
    """{"source", "text"} of up to `max_bytes` of text, in the order of `_files`, without near-duplicate paragraphs."""
    known: set[int] = set()
    total = 0
    for source, path in make_bar(_files(), desc="corpus", unit="file"):
        lines: list[str] = []
        for paragraph in [*paragraphs(_text(path)), ""]:
            size = sum(map(len, lines))
            if size > LONGEST or (not paragraph and size > SHORTEST):
                yield {"source": source, "text": "\n".join(lines)}
                lines, total = [], total + size
            words = paragraph.lower().split()
            runs = {hash(tuple(words[i : i + RUN_WORDS])) for i in range(max(len(words) - RUN_WORDS + 1, 1))}
            if paragraph and len(runs & known) < MAX_KNOWN * len(runs):
                known |= runs
                lines.append(paragraph)
        if total >= max_bytes:
            return


def _files() -> list[tuple[str, Path]]:
    """(name, path) of the installation's documents, then modules, in the order of a hash."""
    files: dict[str, Path] = {}
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not SKIPPED.match(name)]
            chosen = [Path(folder, name) for name in names if name.endswith((".py", ".rst", ".md"))]
            files |= {path.relative_to(root).as_posix(): path for path in chosen if not SKIPPED.match(path.name)}
    return sorted(files.items(), key=lambda file: (file[1].suffix == ".py", zlib.crc32(file[0].encode())))


def _text(path: Path) -> str:
    """Documentation in a file; "" if the file is unreadable, not UTF-8 or does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        quoted = sum(map(len, text.split('"""')[1::2]))
        if path.suffix != ".py" or (quoted < 0.25 * len(text) and path.name != "topics.py"):
            return "" if path.suffix == ".py" else text  # a file of code alone is not worth the time to parse it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            nodes = [*ast.walk(ast.parse(text))]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""
    statements = [node.value for node in nodes if isinstance(node, ast.Expr)]  # docstrings among them
    topics = [value for node in nodes if isinstance(node, ast.Dict) for value in node.values]
    found = [node.value for node in statements + topics if isinstance(node, ast.Constant)]
    return "\n\n".join(inspect.cleandoc(value) for value in found if isinstance(value, str))


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of plain prose in a docstring, an .rst or .md file, each on one line."""
    for block in _blocks(_FENCED.sub("\n", text.expandtabs())):
        if len(block) < 40 or block[0].islower() or block[0].isdigit():
            continue  # never prose: not worth cleaning
        for pattern, replacement in _INLINE:
            block = pattern.sub(replacement, block)
        block = " ".join(block.split()).strip(" *`_")
        if block.endswith(":"):  # the end of it introduced a piece of code
            block = block[: max(block.rfind(stop, 0, -1) for stop in (". ", "? ", "! ")) + 1]
        if is_prose(block):
            yield block


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, separated by blank lines, indentation and list items; without literal blocks and headings."""
    lines: list[str] = []
    indent, is_item, literal = 0, False, 1 << 30  # lines indented deeper than `literal` are a literal block
    for line in [*text.splitlines(), ""]:
        content, depth = line.strip(), len(line) - len(line.lstrip())
        if content and depth > literal:
            continue
        literal = 1 << 30 if content else literal
        start = _ITEM.match(content)
        is_text = bool(start or (content and not _NO_TEXT.match(content)))
        if is_text and not start and lines and (depth == indent or (is_item and depth > indent)):
            lines.append(content)
            indent, is_item = depth, False
            continue
        if _RULE.match(content):
            lines = []
        elif content.startswith("..") and not start:
            literal = depth
        elif not content and lines and lines[-1].endswith("::"):
            literal = indent
        if lines:
            yield " ".join(lines)
        lines = [content[start.end() if start else 0 :]] if is_text else []
        indent, is_item = depth, bool(start)


def is_prose(paragraph: str) -> bool:
    """Return True for complete English sentences of mostly ordinary words."""
    words = paragraph.split()
    common = [word for word in words if word in _COMMON]
    return (
        paragraph.endswith((".", "!", "?", '."', ".)", ".'"))
        and (paragraph[0].isupper() or paragraph[0] in "\"'(")
        and paragraph.isprintable()
        and len(paragraph.encode("ascii", "ignore")) >= 0.95 * len(paragraph)
        and len(common) >= 0.15 * len(words)
        and len(set(common)) >= 2
        and sum(map(bool, map(_WORD.match, words))) >= 0.75 * len(words) >= 5.25
        and len(_SYMBOL.findall(paragraph)) <= 0.25 * len(words)
        and not _BOILERPLATE.search(paragraph.lower())
    )
