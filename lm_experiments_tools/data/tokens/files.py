"""The three files of tokenized data, PREFIX.bin, PREFIX.idx and PREFIX.json: their paths, and checks of their origin.

Token files are replaced only if they have the same inputs and vocabulary as the new ones.
"""

import glob
import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.checkpoint.source import TOKENIZER_FILES, hub_folder, may_be_on_hub
from lm_experiments_tools.data.text.tokenizer import BYTES, Tokenizer
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import read_json

logger = logging.getLogger(__name__)

OWN_BYTES = 6  # of the unique part of a temporary name
_META_TYPES = {  # of what other modules read in PREFIX.json
    **dict.fromkeys(("num_bytes", "bad_lines", "num_sequences", "empty_documents"), int),
    **dict.fromkeys(("vocab_file", "vocab_sha256", "bin_sha256", "tokenizer_fingerprint"), str),
    "shard": dict,
    "input": list,
}


def dataset_paths(prefix: str | os.PathLike) -> tuple[Path, Path, Path]:
    """Return the paths of the three files of tokenized data: PREFIX.bin, PREFIX.idx and PREFIX.json."""
    prefix = os.fspath(prefix)
    return Path(prefix + ".bin"), Path(prefix + ".idx"), Path(prefix + ".json")


def dataset_exists(prefix: str | os.PathLike) -> bool:
    """Return True if PREFIX.bin and PREFIX.idx exist."""
    bin_path, idx_path, _ = dataset_paths(prefix)
    return bin_path.is_file() and idx_path.is_file()


def read_meta(prefix: str | os.PathLike) -> dict[str, Any]:
    """Return the content of PREFIX.json, which describes a token file, without null values.

    Returns {} if the file does not exist. Raises UserError if it is damaged.
    """
    path = dataset_paths(prefix)[2]
    if not path.is_file():
        return {}
    meta = read_json(path)
    meta = {key: value for key, value in meta.items() if value is not None or key not in _META_TYPES}
    for key, kind in _META_TYPES.items():
        if key in meta and not isinstance(meta[key], kind):
            raise UserError(f"{path} is damaged: {key} is {meta[key]!r}, not a {kind.__name__}; copy it again")
    return meta


def recorded_inputs(inputs: Iterable[str]) -> list[str]:
    """Convert inputs to the form in which PREFIX.json records them: files by absolute path, datasets by name."""
    return [os.path.abspath(item) if os.path.exists(item) else item for item in inputs]


def check_replaceable(prefix: str, inputs: list[str], vocab_file: str, vocab_sha256: str) -> None:
    """Raise UserError if existing token files are of other inputs or another vocabulary, so must not be replaced.

    Args:
        prefix: path of the existing files, without suffix.
        inputs: the new inputs, as `recorded_inputs` returns them.
        vocab_file, vocab_sha256: path and fingerprint of the new vocabulary.
    """
    if not dataset_exists(prefix):
        return
    try:
        meta = read_meta(prefix)
    except UserError:  # damaged: as good as none
        meta = {}
    if inputs and meta.get("input") == inputs and meta.get("vocab_sha256") == vocab_sha256:
        return
    made_of = ", ".join(map(str, meta.get("input") or ())) or "unknown text"
    raise UserError(
        f"{prefix}.bin and .idx exist, tokens of {made_of} with the vocabulary {meta.get('vocab_file') or 'unknown'}, "
        f"not of {', '.join(inputs) or 'unknown text'} with {vocab_file}: choose another --output, or give --overwrite"
    )


@cache  # once, however often a run opens the file
def _warn_unrecorded(meta_path: Path) -> None:
    fact = "records no vocabulary" if meta_path.is_file() else "does not exist"
    logger.warning(
        "%s %s, so the tokens cannot be verified: copy the .json of `lmtools tokenize` or preprocess_data.py too",
        meta_path,
        fact,
    )


def warn_unrecorded(prefix: str | os.PathLike, meta: dict[str, Any]) -> None:
    """Log a warning, once per file, if the PREFIX.json of a token file does not name a vocabulary.

    Args:
        prefix: path of the token file, without suffix.
        meta: content of PREFIX.json.
    """
    if "vocab_sha256" not in meta:
        _warn_unrecorded(dataset_paths(prefix)[2])


def open_tokenizer(name: str | os.PathLike, flag: str = "--vocab", lowercase: bool | None = None) -> Tokenizer:
    """Load a tokenizer from a file, a folder or the Hugging Face Hub. The files of a checkpoint are verified first.

    Args:
        flag: the flag that names it, for error messages.
        lowercase: see `Tokenizer.load`.
    """
    path = Path(name)
    if os.fspath(name) != BYTES and not path.exists() and may_be_on_hub(os.fspath(name)):
        try:
            path = hub_folder(os.fspath(name), flag, TOKENIZER_FILES)
        except OSError as error:
            raise UserError(
                f"{flag} {name}: neither this machine nor the Hub has it ({first_line(error)})."
            ) from error
    verify_model(path)
    return Tokenizer.load(path, lowercase=lowercase)


def recorded_vocabulary(prefix: str | os.PathLike, meta: dict[str, Any]) -> Path | None:
    """Return the path of the vocabulary that a token file was made with; None if it does not exist.

    Args:
        prefix: path of the token file, without suffix.
        meta: content of PREFIX.json, which names the vocabulary.
    """
    if meta.get("vocab_file") is None:
        return None
    named = Path(meta["vocab_file"])
    if meta["vocab_file"] == BYTES:
        return named
    return next((path for path in (named, Path(prefix).parent / named.name) if path.exists()), None)


def token_prefix(path: str | os.PathLike) -> str | None:
    """Return the prefix of a token file, which is the path of its .bin and .idx files without these suffixes.

    Args:
        path: path of the token file, with or without .bin or .idx.

    Returns:
        The prefix, or None if there is no token file.

    Raises:
        UserError: only one of PREFIX.bin and PREFIX.idx exists.
    """
    path = os.fspath(path)
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    bin_path, idx_path, _ = dataset_paths(prefix)
    found = [file for file in (bin_path, idx_path) if file.is_file()]
    if len(found) == 1 and (prefix != path or not os.path.exists(path)):
        missing = idx_path if found[0] == bin_path else bin_path
        raise UserError(f"{found[0]} exists without {missing}: copy that too, or make both by `lmtools tokenize`")
    return prefix if len(found) == 2 else None


def remove_unfinished(prefix: str | os.PathLike) -> None:
    """Delete the temporary files that killed writers of a token file left. The caller must hold the lock of PREFIX."""
    for path in dataset_paths(prefix):
        for left in path.parent.glob(f"{glob.escape(path.name)}.tmp{'[0-9a-f]' * 2 * OWN_BYTES}"):
            left.unlink(missing_ok=True)
