"""A corpus that every machine has: the documentation of its Python installation, as clean English prose.

Sources: the topics of `pydoc_data`, the docstrings of the standard library and of the installed packages (found by
`ast`; nothing is imported), and the .rst, .md and .txt documents and long descriptions that packages ship. Paragraphs
that were seen before, exactly or with other names in them, are dropped. No network is used, and one installation
always gives the same files.
"""

import ast
import hashlib
import inspect
import json
import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.prose import paragraphs, similarity_key
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import write_atomic

_SKIPPED_FOLDERS = frozenset(
    "__pycache__ test tests testing idle_test _vendor vendor third_party site-packages lib2to3 licenses node_modules "
    "benchmarks lm_experiments_tools".split()
)
_SKIPPED_NAMES = (
    "license",
    "licence",
    "copying",
    "notice",
    "author",
    "third",
    "requirements",
    "top_level",
    "entry_points",
)
_DOCUMENT_CHARACTERS = 3000  # cut here, between docstrings: ~700 tokens, longer than one training example
_SHORTEST_DOCUMENT = 300
_DOCSTRING_SHARE = 0.25  # a source file with less of it in triple quotes is not worth parsing
_LARGEST_FILE = 2 << 20


@dataclass(frozen=True)
class CorpusSummary:
    """What build_corpus wrote. Sizes are bytes of UTF-8 text, without the JSON around it."""

    train_path: Path
    valid_path: Path
    num_train_documents: int
    num_valid_documents: int
    num_train_bytes: int
    num_valid_bytes: int


def build_corpus(
    output_dir: str | os.PathLike, *, max_bytes: int = 20_000_000, validation_share: float = 0.03
) -> CorpusSummary:
    """Write manifest.json, README.md, valid.jsonl and, last, train.jsonl into `output_dir`.

    Each line is {"text", "source"}. A document belongs to the validation set by a hash of its text, so another run, or
    an installation with more packages, never moves a document from one set to the other.

    Args:
        max_bytes: stop at this much text; a small installation may hold less.
        validation_share: of documents, in (0, 1).

    Raises:
        UserError: a number out of range, the folder holds something else than an earlier corpus, or the installation
            holds no documentation.
    """
    if not 0 < validation_share < 1:
        raise UserError(f"the validation share is {validation_share}; it lies between 0 and 1, for example 0.03")
    output_dir = Path(output_dir)
    _clear(output_dir)
    train: list[str] = []
    valid: list[str] = []
    sizes = {"train": 0, "valid": 0}
    packages: Counter[str] = Counter()
    for text, source in _documents(max_bytes):
        name, lines = ("valid", valid) if _hash(text) < validation_share * 2**64 else ("train", train)
        lines.append(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
        size = len(text.encode())
        sizes[name] += size
        packages[source.split("/")[0]] += size
    if not valid or not train:
        raise UserError(
            f"the Python installation at {sysconfig.get_path('stdlib')} gave {len(train)} training and {len(valid)} "
            f"validation documents, too few to go on with; install its documentation or use text of your own"
        )
    summary = CorpusSummary(
        output_dir / "train.jsonl", output_dir / "valid.jsonl", len(train), len(valid), sizes["train"], sizes["valid"]
    )
    _describe(output_dir, summary, packages)
    write_atomic(summary.valid_path, "".join(valid))
    write_atomic(summary.train_path, "".join(train))
    return summary


def _describe(output_dir: Path, summary: CorpusSummary, packages: Counter) -> None:
    """manifest.json for programs and README.md for people."""
    manifest: dict[str, Any] = asdict(summary) | {
        "train_path": summary.train_path.name,
        "valid_path": summary.valid_path.name,
        "num_bytes_of_package": dict(sorted(packages.items(), key=lambda item: (-item[1], item[0]))),
    }
    write_atomic(output_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    write_atomic(
        output_dir / "README.md",
        "# Documentation of this Python installation\n\n"
        "English prose from docstrings, `pydoc_data` topics and documents of the installed packages, made by "
        "`lmtools corpus`.\nOne JSON object a line: `text`, and `source` (a file of the installation). The texts are "
        "under the licences of\ntheir packages.\n\n"
        f"train.jsonl: {summary.num_train_documents} documents, {summary.num_train_bytes / 1e6:.1f} MB of text; "
        f"valid.jsonl: {summary.num_valid_documents}, {summary.num_valid_bytes / 1e6:.1f} MB.\n",
    )


def _clear(output_dir: Path) -> None:
    """Make the folder; remove an earlier corpus (its manifest tells), and nothing else."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for path in (output_dir / "train.jsonl", output_dir / "valid.jsonl"):
        if path.exists() and not (output_dir / "manifest.json").is_file():
            raise UserError(f"{path} was not made by `lmtools corpus`; give another folder")
        path.unlink(missing_ok=True)


def _documents(max_bytes: int) -> Iterator[tuple[str, str]]:
    """(text, source) until `max_bytes`: documents first, then source files in the order of the hash of their names."""
    seen: set[int] = set()
    total = 0
    for source, docstrings in _texts():
        for text in _cut(docstrings, seen):
            yield text, source
            total += len(text.encode())
        if total >= max_bytes:
            return


def _cut(docstrings: list[str], seen: set[int]) -> Iterator[str]:
    """Join what is new in the docstrings of one file into documents."""
    lines: list[str] = []
    size = 0
    for docstring in docstrings:
        for paragraph in paragraphs(docstring):
            # Two keys: the first also catches short paragraphs, whose second one would be too little to compare.
            keys = {_hash(paragraph)}
            if len(key := similarity_key(paragraph)) > 30:
                keys.add(_hash(key))
            if keys & seen:
                continue
            seen |= keys
            lines.append(paragraph)
            size += len(paragraph)
        if size > _DOCUMENT_CHARACTERS:
            yield "\n".join(lines)
            lines, size = [], 0
    if size > _SHORTEST_DOCUMENT:
        yield "\n".join(lines)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _texts() -> Iterator[tuple[str, list[str]]]:
    """(source, texts in the order of the file) for everything the installation has."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    roots = dict.fromkeys([stdlib, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))])
    files = [(root, path) for root in roots for path in _walk(root)]
    yield "pydoc_data/topics.py", _topics(stdlib / "pydoc_data" / "topics.py")
    for root, path in files:
        if path.suffix != ".py":
            yield path.relative_to(root).as_posix(), [_read_document(path)]
    sources = [(path.relative_to(root).as_posix(), path) for root, path in files if path.suffix == ".py"]
    for source, path in sorted(sources, key=lambda item: (_hash(item[0]), item[0])):
        yield source, _docstrings(path)


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            suffix = os.path.splitext(name)[1]
            described = name == "METADATA" and folder.endswith(".dist-info")
            if (suffix in (".py", ".rst", ".md", ".txt") or described) and not name.lower().startswith(_SKIPPED_NAMES):
                yield Path(folder, name)


def _read(path: Path) -> str:
    """The text of a file; "" where it is too large to be documentation, unreadable, or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _LARGEST_FILE else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _read_document(path: Path) -> str:
    text = _read(path)
    return text.partition("\n\n")[2] if path.name == "METADATA" else text


def _topics(path: Path) -> list[str]:
    """The texts of `help('topics')`: the one dictionary in pydoc_data/topics.py."""
    for node in ast.parse(_read(path)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [str(ast.literal_eval(value)) for value in node.value.values]
    return []


def _docstrings(path: Path) -> list[str]:
    """All docstrings of a source file, in order; nothing where there are few or the file does not parse."""
    source = _read(path)
    quoted = sum(map(len, source.split('"""')[1::2]))
    if quoted < max(_SHORTEST_DOCUMENT, _DOCSTRING_SHARE * len(source)):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return list(_docstrings_of(tree))


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    body = node.body
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        yield inspect.cleandoc(first.value)
    for child in body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _docstrings_of(child)
