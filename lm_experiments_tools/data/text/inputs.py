"""What a user names as text -> files, each once, with the kind of each; and what of a folder is not read, said.

| input | what is read |
|---|---|
| a file | by its ending: JSON lines, text, or a dataset (.parquet, .arrow) |
| a folder | all JSON lines and text in it, recursively, in sorted order; links are followed, and nothing read twice |
| a folder of .parquet or .arrow files and no text | as a Hugging Face dataset |
| `name[:config][:split]` | a Hugging Face dataset |

In folders, hidden files and what this program wrote (token files, lists of bad lines, pieces of a tokenization that
was stopped) are no input, so that an output may lie where the text does.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.bad_lines import listed
from lm_experiments_tools.data.text.compression import COMPRESSIONS, check_readable, endings, open_decompressed
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes

logger = logging.getLogger(__name__)

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt",)
READABLE = f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)} (also with {', '.join(COMPRESSIONS)})"
_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]*)?(:[^:]+)?")
_UNFINISHED = re.compile(r"\.(bin|idx|json)\.tmp[0-9a-f]{12}$")
_TOKEN_ENDINGS = (".bin", ".idx", ".json")
_BLOCK_LINES, _BLOCK_BYTES = 1000, 1 << 20  # of a text file, in which a blank line is looked for
_LISTED = 8  # endings of what is passed over


def find_files(inputs: Sequence[str]) -> list[tuple[str, str]]:
    """(path, kind) of all files, and of the datasets by name, which are not opened; kind: json, text or dataset.

    Raises UserError where an input does not exist or is of an unknown kind, where a file would be read twice, where
    most of a folder cannot be read, and where there is nothing to read at all.
    """
    found = [_resolve(os.fspath(item)) for item in inputs]
    _check_disjoint(inputs, found)
    files = [file for of_item in found for file in of_item]
    if not any(kind == "dataset" or os.path.getsize(path) for path, kind in files):
        raise UserError(f"there is no text in {listed(inputs)}: {len(files)} files, all of them empty")
    for path, kind in files:
        if kind != "dataset":
            check_readable(path)
        if kind == "text":
            _warn_of_one_block(path)
    return files


def _warn_of_one_block(path: str) -> None:
    """Warn of a text file whose first lines have no blank line among them."""
    try:
        with open_decompressed(path) as file:
            lines = file.read(_BLOCK_BYTES).split(b"\n")
    except (OSError, EOFError):  # reported where the file is read
        return
    if len(lines) > _BLOCK_LINES and all(line.strip() for line in lines[:_BLOCK_LINES]):
        _warn_once(
            f"{path} has no blank line in its first {_BLOCK_LINES:,} lines, which are one document: put a blank line "
            "between documents, or write one JSON line for each"
        )


def _check_disjoint(inputs: Sequence[str], found: Sequence[list[tuple[str, str]]]) -> None:
    """Refuse a file, or a dataset, of two inputs: its documents would come twice as often as the others."""
    first: dict[object, tuple[int, str]] = {}
    for number, files in enumerate(found):
        for path, _ in files:
            status = os.stat(path) if os.path.exists(path) else None
            place = (status.st_dev, status.st_ino) if status else path
            other, name = first.setdefault(place, (number, path))
            if other != number:
                also = f", there as {name}" if name != path else ""
                raise UserError(
                    f"{path} is named twice, by the inputs {inputs[other]} and {inputs[number]}{also}: its documents "
                    f"would be read twice; name it once"
                )


def _resolve(item: str) -> list[tuple[str, str]]:
    """(path, kind) of the files an input stands for, or the name of a Hugging Face dataset."""
    if os.path.isdir(item):
        return _files_in(item)
    if os.path.exists(item):
        if not os.path.isfile(item):
            raise UserError(f"{item} is neither a regular file nor a folder; write its text to a file first")
        kind = "dataset" if hf_datasets.is_data_file(item) else _kind(item)
        if not kind:
            readable = f"{READABLE}, {', '.join(hf_datasets.DATA_SUFFIXES)}"
            raise UserError(f"{item} is none of {readable}; rename or convert it")
        return [(item, kind)]
    if os.path.isdir(hf_datasets.split_name(item)[0]):
        return [(item, "dataset")]  # folder:config:split
    looks_local = item.startswith((".", "/", "~")) or os.path.isdir(os.path.dirname(item) or "\0")
    if looks_local or _kind(item) or not _DATASET_NAME.fullmatch(item):
        raise UserError(f"{item} does not exist")
    return [(item, "dataset")]


def _kind(path: str) -> str:
    ending = endings(path)[0]
    return "json" if ending in JSON_SUFFIXES else "text" if ending in TEXT_SUFFIXES else ""


def _files_in(folder: str) -> list[tuple[str, str]]:
    found = _walk(folder)
    files = [(path, _kind(path)) for path in found if _kind(path)]
    others = [path for path in found if not _kind(path)]
    if not files and any(map(hf_datasets.is_data_file, others)):
        return [(folder, "dataset")]
    if not files:
        raise UserError(f"folder {folder} has no {READABLE} file in it ({len(others)} others)")
    if dangling := next((path for path, _ in files if not os.path.exists(path)), None):
        raise UserError(f"{dangling} is a link to {os.readlink(dangling)}, which does not exist: mend or remove it")
    _account_for(folder, [path for path, _ in files], others)
    return files


def _walk(folder: str) -> list[str]:
    """Paths of all files that may be input, in sorted order, each file once.

    Where a file is there under its own name and by links, it is taken under its own name.
    """
    folders, seen, links = [folder], set(), []
    found: dict[str, str] = {}
    for start in folders:  # which grows by links to folders
        for path, below, names in os.walk(start, onerror=_refuse):
            real = os.path.realpath(path)
            if real in seen:
                below.clear()
                continue
            seen.add(real)
            below[:] = [name for name in below if not (name.startswith(".") or _is_stopped_work(path, name))]
            folders += sorted(filter(os.path.islink, (os.path.join(path, name) for name in below)))
            siblings = set(names)
            for name in names:
                if name.startswith(".") or _is_output(name, siblings):
                    continue
                own = os.path.join(path, name)
                if os.path.exists(own) and not os.path.isfile(own):  # opening a named pipe waits for ever
                    _warn_once(f"{own} is no regular file and is passed over")
                elif os.path.islink(own):
                    links.append(own)
                else:
                    found.setdefault(os.path.join(real, name), own)
    for link in sorted(links):
        found.setdefault(os.path.realpath(link), link)
    return sorted(found.values())


def _refuse(error: OSError) -> None:
    raise UserError(f"folder {error.filename} cannot be read: {error.strerror}") from None


def _is_output(name: str, siblings: Collection[str]) -> bool:
    """True for what this program writes beside these names: token files with their record, lists of bad lines."""
    stem, ending = os.path.splitext(name)
    whole = f"{stem}.idx" in siblings and (ending == ".json" or f"{stem}.bin" in siblings)
    return name.endswith(".bad_lines.jsonl") or bool(_UNFINISHED.search(name)) or (whole and ending in _TOKEN_ENDINGS)


def _is_stopped_work(path: str, name: str) -> bool:
    """True for the pieces of a tokenization that is at work or was stopped."""
    return name.endswith(".pieces") and os.path.isfile(os.path.join(path, name, "plan.json"))


def _account_for(folder: str, files: Sequence[str], others: Sequence[str]) -> None:
    """Say what of a folder is passed over; UserError where that is more than what is read."""
    sizes = {path: os.path.getsize(path) for path in others if os.path.isfile(path) and os.path.getsize(path)}
    if not sizes:
        return
    passed, read = sum(sizes.values()), sum(map(os.path.getsize, files))
    kinds = Counter(os.path.splitext(path)[1].lower() or "without an ending" for path in sizes)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_LISTED))
    what = f"{len(sizes)} files of {human_bytes(passed)} ({named}{', ...' if len(kinds) > _LISTED else ''})"
    if passed > read:
        raise UserError(
            f"most of folder {folder} cannot be read: {what} are none of {READABLE}, beside {len(files)} files of "
            f"{human_bytes(read)} that are: name the files to read themselves, convert the others or move them away"
        )
    _warn_once(f"folder {folder}: {what} are passed over, {len(files)} of {human_bytes(read)} are read")


@cache  # a plan may be made several times
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
