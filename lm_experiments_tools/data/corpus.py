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
from dataclasses import dataclass
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
_DOCSTRING_SHARE = 0.2  # a source file with less of it in triple quotes is not worth parsing
_LARGEST_FILE = 2 << 20


@dataclass(frozen=True)
class CorpusSummary:
    """What build_corpus wrote. Sizes are bytes of UTF-8 text, without the JSON around it."""

    output_dir: Path
    train_files: list[str]
    validation_file: str
    num_train_documents: int
    num_validation_documents: int
    num_train_bytes: int
    num_validation_bytes: int


def build_corpus(
    output_dir: str | os.PathLike,
    *,
    max_bytes: int = 20_000_000,
    validation_share: float = 0.03,
    shard_bytes: int = 4_000_000,
) -> CorpusSummary:
    """Write train-*.jsonl, validation.jsonl, manifest.json and README.md into `output_dir`.

    Each line is {"text", "source"}. A document belongs to the validation set by a hash of its text, so another run, or
    an installation with more packages, never moves a document from one set to the other.

    Args:
        max_bytes: stop at this much text; a small installation may hold less.
        validation_share: of documents, in (0, 1).
        shard_bytes: size of a training file.

    Raises:
        UserError: the folder holds something else than an earlier corpus, or the installation holds no documentation.
    """
    output_dir = Path(output_dir)
    _clear(output_dir)
    train: list[list[str]] = [[]]
    validation: list[str] = []
    sizes: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    shard_size = 0
    for text, source in _documents(max_bytes):
        line = json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n"
        size = len(text.encode())
        packages[source.split("/")[0]] += size
        if _hash(text) < validation_share * 2**64:
            validation.append(line)
            sizes["validation"] += size
            continue
        if shard_size > shard_bytes:
            train.append([])
            shard_size = 0
        train[-1].append(line)
        shard_size += size
        sizes["train"] += size
    if not validation or not train[0]:
        raise UserError(
            f"the Python installation at {sysconfig.get_path('stdlib')} holds too little documentation to train on"
        )
    names = [f"train-{shard:05d}-of-{len(train):05d}.jsonl" for shard in range(len(train))]
    for name, lines in zip(names, train, strict=True):
        write_atomic(output_dir / name, "".join(lines))
    write_atomic(output_dir / "validation.jsonl", "".join(validation))
    summary = CorpusSummary(
        output_dir,
        names,
        "validation.jsonl",
        sum(map(len, train)),
        len(validation),
        sizes["train"],
        sizes["validation"],
    )
    _describe(summary, packages)
    (output_dir / ".building").unlink()
    return summary


def _describe(summary: CorpusSummary, packages: Counter) -> None:
    """README.md for people, and manifest.json, written last: it says that the corpus is whole."""
    write_atomic(
        summary.output_dir / "README.md",
        "# Documentation of this Python installation\n\n"
        "English prose from docstrings, `pydoc_data` topics and documents of the installed packages, made by "
        "`lmtools corpus`.\nOne JSON object a line: `text`, and `source` (a file of the installation). The texts are "
        "under the licences of\ntheir packages.\n\n"
        f"{summary.num_train_documents} training and {summary.num_validation_documents} validation documents, "
        f"{summary.num_train_bytes / 1e6:.1f} and {summary.num_validation_bytes / 1e6:.1f} MB of text.\n",
    )
    manifest: dict[str, Any] = {
        "train_files": summary.train_files,
        "validation_file": summary.validation_file,
        "num_train_documents": summary.num_train_documents,
        "num_validation_documents": summary.num_validation_documents,
        "num_train_bytes": summary.num_train_bytes,
        "num_validation_bytes": summary.num_validation_bytes,
        "num_bytes_of_package": dict(sorted(packages.items(), key=lambda item: (-item[1], item[0]))),
    }
    write_atomic(summary.output_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _clear(output_dir: Path) -> None:
    """Make the folder; remove an earlier corpus, and nothing else."""
    output_dir.mkdir(parents=True, exist_ok=True)
    earlier = [*output_dir.glob("train-*-of-*.jsonl"), *output_dir.glob("validation.jsonl")]
    manifest = output_dir / "manifest.json"
    if earlier and not manifest.is_file() and not (output_dir / ".building").is_file():
        raise UserError(
            f"{output_dir} holds {earlier[0].name}, which `lmtools corpus` did not make; give another folder"
        )
    (output_dir / ".building").touch()
    for path in (manifest, *earlier):
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
