"""A corpus that every machine has: the documentation of its Python installation, as clean English prose.

Sources: the topics of `pydoc_data`, the docstrings of the standard library and of the installed packages (found by
`ast`; nothing is imported), and the .rst, .md and .txt documents and long descriptions that packages ship. Paragraphs
that were seen before, exactly or with other names in them, are dropped. No network is used, and one installation
always gives the same files, whatever the number of processes: those only read files and pick paragraphs, each file on
its own; what was seen before is decided here, in the order of the files.
"""

import ast
import gc
import hashlib
import inspect
import json
import logging
import os
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.workers import Caller, WorkerEnded, WorkerPool, available_cores
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import write_atomic
from lm_experiments_tools.tools.demo_corpus.prose import paragraphs, similarity_key

logger = logging.getLogger(__name__)

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
_RUN_WORDS = 8
_KNOWN_SHARE = 0.2  # of a held-out paragraph's runs of so many words; with more in training text it is left out
_DOCSTRING_SHARE = 0.25  # a source file with less of it in triple quotes is not worth parsing
_LARGEST_FILE = 2 << 20
_TOPICS = "pydoc_data/topics.py"
_SECONDS_BETWEEN_LINES = 5.0  # of progress
_BATCH_FILES = 64  # per message to a worker: some tens of milliseconds of work

_Docstring = list[tuple[str, list[int]]]  # its paragraphs, each with the hashes by which it is known again


@dataclass(frozen=True)
class CorpusSummary:
    """Files that build_corpus wrote. Sizes are bytes of UTF-8 text, without the JSON around it."""

    train_path: Path
    valid_path: Path
    num_train_documents: int
    num_valid_documents: int
    num_train_bytes: int
    num_valid_bytes: int


def build_corpus(
    output_dir: str | os.PathLike,
    *,
    max_bytes: int = 20_000_000,
    validation_share: float = 0.03,
    workers: int | None = None,
) -> CorpusSummary:
    """Write manifest.json, README.md, valid.jsonl and, last, train.jsonl into `output_dir`.

    Each line is {"text", "source"}. A file belongs to the validation set, whole, by a hash of its name: another run,
    or an installation with more packages, never moves one from set to set. Its paragraphs that much resemble one of
    the training set are left out.

    Args:
        max_bytes: stop at this much text; a small installation may hold less.
        validation_share: of files, in (0, 1).
        workers: processes that read files; None takes one for each CPU this process may use. The result is the same.

    Raises:
        UserError: a number out of range, the folder holds something else than an earlier corpus, or the installation
            holds no documentation.
    """
    if not 0 < validation_share < 1:
        raise UserError(f"the validation share is {validation_share}; it lies between 0 and 1, for example 0.03")
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; at least one process has to do the work")
    output_dir = Path(output_dir)
    _clear(output_dir)
    train: list[tuple[str, str]] = []
    valid: list[tuple[str, str]] = []
    with closing(_documents(max_bytes, workers or available_cores())) as documents:
        for text, source in documents:
            (valid if _hash(source) < validation_share * 2**64 else train).append((text, source))
    valid = list(_unlike(valid, train))
    if not valid or not train:
        raise UserError(
            f"the Python installation at {sysconfig.get_path('stdlib')} gave {len(train)} training and {len(valid)} "
            f"validation documents, too few to go on with; install its documentation or use text of your own"
        )
    packages: Counter[str] = Counter()
    for text, source in train + valid:
        packages[source.split("/")[0]] += len(text.encode())
    sizes = [sum(len(text.encode()) for text, _ in documents) for documents in (train, valid)]
    summary = CorpusSummary(output_dir / "train.jsonl", output_dir / "valid.jsonl", len(train), len(valid), *sizes)
    _describe(output_dir, summary, packages)
    for path, documents in ((summary.valid_path, valid), (summary.train_path, train)):
        rows = ({"text": text, "source": source} for text, source in documents)
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return summary


def _unlike(valid: list[tuple[str, str]], train: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Held-out documents without the paragraphs that say much of what a training paragraph says in its words."""
    known = {run for text, _ in train for paragraph in text.split("\n") for run in _runs(paragraph)}
    for text, source in valid:
        kept = []
        for paragraph in text.split("\n"):
            runs = _runs(paragraph)
            if sum(run in known for run in runs) <= _KNOWN_SHARE * len(runs):
                kept.append(paragraph)
        if sum(map(len, kept)) > _SHORTEST_DOCUMENT:
            yield "\n".join(kept), source


def _runs(paragraph: str) -> list[int]:
    """Hashes of all runs of words of one length in a paragraph."""
    words = paragraph.lower().split()
    return [hash(tuple(words[i : i + _RUN_WORDS])) for i in range(len(words) - _RUN_WORDS + 1)]


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


def _documents(max_bytes: int, workers: int) -> Iterator[tuple[str, str]]:
    """(text, source) until `max_bytes`: documents first, then source files in the order of the hash of their names."""
    seen: set[int] = set()
    total = 0
    logger.info("looking for documentation in %s", sysconfig.get_path("stdlib"))
    files = _files()
    logger.info("reading up to %d files", len(files))
    said = time.monotonic()
    with closing(_read_all([path for _, path in files], workers)) as contents:
        for number, ((source, _), docstrings) in enumerate(zip(files, contents, strict=True)):
            if time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                logger.info("%d files read, %.1f of at most %.1f MB of text", number, total / 1e6, max_bytes / 1e6)
            for text in _cut(docstrings, seen):
                yield text, source
                total += len(text.encode())
            if total >= max_bytes:
                return


def _cut(docstrings: list[_Docstring], seen: set[int]) -> Iterator[str]:
    """Join what is new in the docstrings of one file into documents."""
    lines: list[str] = []
    size = 0
    for docstring in docstrings:
        for paragraph, keys in docstring:
            if not seen.isdisjoint(keys):
                continue
            seen.update(keys)
            lines.append(paragraph)
            size += len(paragraph)
        if size > _DOCUMENT_CHARACTERS:
            yield "\n".join(lines)
            lines, size = [], 0
    if size > _SHORTEST_DOCUMENT:
        yield "\n".join(lines)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _files() -> list[tuple[str, str]]:
    """(source, path) of everything the installation has, in the order in which it is used."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    roots = dict.fromkeys([stdlib, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))])
    files = [(path.relative_to(root).as_posix(), str(path)) for root in roots for path in _walk(root)]
    documents = [file for file in files if not file[1].endswith(".py")]
    modules = [file for file in files if file[1].endswith(".py") and file[0] != _TOPICS]
    modules.sort(key=lambda file: (_hash(file[0]), file[0]))
    return [(_TOPICS, str(stdlib / _TOPICS)), *documents, *modules]


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


def _read_paragraphs(path: str) -> list[_Docstring]:
    """The prose of one file, in its order."""
    return [
        [(paragraph, _keys(paragraph)) for paragraph in found]
        for text in _texts(Path(path))
        if (found := paragraphs(text))
    ]


def _keys(paragraph: str) -> list[int]:
    # Two keys: the first also catches short paragraphs, whose second one would be too little to compare.
    key = similarity_key(paragraph)
    return [_hash(paragraph), _hash(key)] if len(key) > 30 else [_hash(paragraph)]


def _texts(path: Path) -> list[str]:
    if path.suffix == ".py":
        return _topics(path) if path.as_posix().endswith(_TOPICS) else _docstrings(path)
    text = _read(path)
    return [text.partition("\n\n")[2] if path.name == "METADATA" else text]


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
    collects = gc.isenabled()
    gc.disable()  # a syntax tree has no cycles, and looking for them takes a quarter of the time of parsing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            return list(_docstrings_of(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    finally:
        if collects:
            gc.enable()


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    body = node.body
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        yield inspect.cleandoc(first.value)
    for child in body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _docstrings_of(child)


# ---- processes ----


def _read_all(paths: list[str], workers: int) -> Iterator[list[_Docstring]]:
    """_read_paragraphs of each file, in order, by as many worker processes as there is work for."""
    batches = [paths[i : i + _BATCH_FILES] for i in range(0, len(paths), _BATCH_FILES)]
    workers = min(workers, len(batches))
    if workers <= 1:
        yield from map(_read_paragraphs, paths)
        return
    with WorkerPool(work, None, workers) as pool:
        try:
            for answer in pool.map(batches):
                yield from answer
        except WorkerEnded as end:
            raise UserError(
                f"a process that reads documentation ended with exit code {end.returncode} (-9: killed, often for "
                f"want of memory) between {end.request[0]} and {end.request[-1]}; try again with fewer workers"
            ) from None


def work(caller: Caller) -> None:
    """A worker process: answers paths with the prose of each."""
    caller.serve(lambda _: lambda paths: [_read_paragraphs(path) for path in paths])
