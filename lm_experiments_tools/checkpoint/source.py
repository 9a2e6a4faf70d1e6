"""Pre-trained models that flags name: on disk or on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.checkpoint.manifest import (
    INDEXES,
    MANIFEST,
    TRAINER_STATE,
    check_untrusted,
    named_checkpoint,
    or_replaced,
    parse_step,
    read_manifest,
    sha256_of,
    verify_model,
)
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import read_json

if TYPE_CHECKING:
    from lm_experiments_tools.config.finetuning import FinetuningArgs

CONFIG = "config.json"  # transformers' name
ADAPTER_CONFIG = "adapter_config.json"  # peft's name
LABELS_FILE = "label_names.json"  # next to the adapter of a classifier: config.json is in its base's folder
KINDS = ("model_type", "task")
TASK_FILE = "finetuning_task.json"  # next to fine-tuned weights: the task and its settings
_FILES = (".pth", ".bin", ".safetensors", ".model", ".json", ".txt")  # suffixes that no name on the Hub has
_TOKENIZER_FILES = ("*token*", "vocab.txt", "spiece.model")
TOKENIZER_FILES = (*_TOKENIZER_FILES, CONFIG, "vocab.json", "merges.txt")  # on the Hub
# transformers' names, in the order in which it looks for them
_WEIGHTS_FILES = ("model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin")


@dataclass(frozen=True)
class Source:
    """Pre-trained weights that a flag names, on disk or on the Hugging Face Hub.

    Attributes:
        path: None on the Hub.
        is_adapter: weights of a peft adapter, which need a base model.
    """

    name: str
    path: Path | None = None
    is_adapter: bool = False

    @property
    def is_file(self) -> bool:
        """True for a single weights file without configuration (t5-experiments, nanoT5)."""
        return self.path is not None and self.path.is_file()

    @property
    def reference(self) -> str:
        """Name by which the weights can be found again: the Hub name, or the absolute path."""
        return self.name if self.path is None else str(self.path.resolve())

    @cached_property
    def config(self) -> dict[str, Any]:
        """Read the content of the model's config.json; empty on the Hub or if there is none. Raises UserError."""
        file = None if self.path is None else self.path / CONFIG
        found = read_json(file) if file is not None and file.is_file() else {}
        real_names(found.get("id2label"), f"{self.path}/{CONFIG}")
        return found

    @cached_property
    def task(self) -> dict[str, Any]:
        """Settings of the task that the weights were fine-tuned for; empty if unknown."""
        return self._json(TASK_FILE)

    def _json(self, name: str) -> dict[str, Any]:
        file = None if self.path is None else self.path / name
        return read_json(file) if file is not None and file.is_file() else {}

    @property
    def base(self) -> str:
        """Name of the base model that an adapter was trained on. Raises UserError."""
        name = read_json(self.base_named_in).get("base_model_name_or_path")
        if not name or not isinstance(name, str):
            raise UserError(f"{self.base_named_in} does not name its base_model_name_or_path: write it there.")
        return name

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of a classifier's labels, by label number; empty if unknown."""
        if self.is_adapter:
            return tuple(self._json(LABELS_FILE).get("label_names", ()))
        return real_names(self.config.get("id2label"), str(self.path / CONFIG))

    def fingerprint(self) -> str | None:
        """sha256 of the weights, which identifies them; None if there are no weight files.

        The hash is taken from the manifest if there is one. For several files it is the sha256 of their sha256, in the
        order of names.
        """
        folder = self.path
        if folder is None:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(self.name, CONFIG)
            folder = Path(cached).parent if isinstance(cached, str) else None
        if folder is None or folder.is_file():
            return None if folder is None else sha256_of(folder)
        files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in _WEIGHTS_FILES)), [])
        known = read_manifest(folder)["files"] if (folder / MANIFEST).is_file() else {}
        sums = [known[file.name]["sha256"] if file.name in known else sha256_of(file) for file in files]
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest() if sums else None

    @property
    def base_named_in(self) -> Path:
        """The file in which an adapter names the base model that it was trained on."""
        return self.path / ADAPTER_CONFIG


def real_names(id2label: Any, where: str) -> tuple[str, ...]:
    """Read a classifier's label names, by number, from `id2label` of a Hugging Face configuration. Raises UserError.

    The default names LABEL_0, LABEL_1, ... give an empty result. `where` is the file, for the error message.
    """
    try:
        named = {int(number): str(name) for number, name in (id2label or {}).items()}
    except (AttributeError, ValueError) as error:
        raise UserError(
            f'{where}: id2label names no label by its number ({error}): write it as {{"0": "no", "1": "yes"}}.'
        ) from error
    names = tuple(named[number] for number in sorted(named))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


# ---- finding what a flag names --------------------------------------------------------------------------------------
def find_source(name: str, flag: str = "--from_pretrained") -> Source:
    """Find the folder, weights file or Hub model called `name`; a run directory gives its best or last checkpoint.

    UserError, which names `flag`, if there is no such source, or the Hub cannot be reached.
    """
    path = or_replaced(Path(name))
    path = path if path.is_symlink() else named_checkpoint(path)
    if path.is_file():
        return Source(name, path)
    if path.is_dir():
        return _folder(path, flag)
    if not may_be_on_hub(name):
        raise UserError(f"{flag} {name}: there is no such file or folder.")
    return hub_source(name, flag)


def may_be_on_hub(name: str) -> bool:
    """Return True for a name that the Hugging Face Hub may have, False for a path or a file name."""
    is_path = name.count("/") > 1 or name.startswith((".", "~", os.sep))
    return not is_path and Path(name).suffix not in _FILES


@cache
def hub_source(name: str, flag: str) -> Source:
    """Find a model on the Hugging Face Hub, and check its configuration; see `hub_folder`."""
    try:
        folder = hub_folder(name, flag, (CONFIG, INDEXES))
    except OSError:  # which loading the model reports
        return Source(name)
    check_untrusted(folder)
    return Source(name)


@cache
def hub_folder(name: str, flag: str, files: tuple[str, ...]) -> Path:
    """Download the files of a model on the Hugging Face Hub that match patterns, and return their folder.

    UserError, which names `flag`, if the Hub or the model cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        # The cache may have the model without files that are not needed here.
        folder = getattr(error, "snapshot_path", None)
        if folder is None:
            reason = first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise UserError(
                f"{flag} {name}: there is no such folder, and the Hugging Face Hub does not give it ({reason}). "
                "Without a network, copy the model to this machine and name its folder."
            ) from error
        return Path(folder)


def _folder(path: Path, flag: str) -> Source:
    # The links come first, because a run's own config.json holds its arguments.
    for link in ("best", "last"):
        checkpoint = named_checkpoint(Path(os.path.realpath(path / link)))
        if any((checkpoint / name).is_file() for name in (MANIFEST, TRAINER_STATE)):
            return _folder(checkpoint, flag)
    verify_model(path)
    if (path / ADAPTER_CONFIG).is_file():
        return Source(str(path), path, is_adapter=True)
    if (path / CONFIG).is_file():
        return Source(str(path), path)
    raise UserError(
        f"{flag} {path}: the folder has neither config.json nor {ADAPTER_CONFIG}, and is no run directory with a "
        "checkpoint (best, last): name a folder written by save_pretrained or by one of our runs."
    )


def find_base(adapter: Source) -> Source:
    """Find the base model that an adapter was trained on. Raises UserError."""
    name, file = adapter.base, adapter.base_named_in
    if os.path.isabs(name) and not os.path.exists(name):
        pruned = " (its run has pruned that checkpoint)" if parse_step(Path(name).name) is not None else ""
        raise UserError(
            f"the base model of the adapter {adapter.name} is gone: there is no {name}{pruned}; put it back, or "
            f"write its new path as base_model_name_or_path into {file}."
        )
    base = find_source(name, f"the base model that {file} names")
    if base.is_adapter:
        raise UserError(f"{adapter.name} was trained on another adapter, {base.name}: merge that one first.")
    return base


class ModelFiles:
    """Finds where the model, tokenizer and configuration of a fine-tuning run come from, each on first use."""

    def __init__(self, args: FinetuningArgs) -> None:
        self.args = args

    @cached_property
    def named(self) -> Source | None:
        """Source of `--from_pretrained`: a model or an adapter."""
        return find_source(self.args.from_pretrained) if self.args.from_pretrained else None

    @property
    def task(self) -> dict[str, Any]:
        """Settings of the task that the weights were fine-tuned for; empty if this run has another task."""
        saved = {} if self.named is None else self.named.task
        return saved if [saved.get(n) for n in KINDS] == [getattr(self.args, n) for n in KINDS] else {}

    @property
    def label_names(self) -> tuple[str, ...]:
        """Label names of the classifier in `--from_pretrained`, by label number; empty if unknown."""
        names = self.named.label_names if self.named is not None else ()
        return names or tuple(self.task.get("label_names", ()))

    @property
    def adapter(self) -> Source | None:
        """Source of `--from_pretrained` if it is an adapter, else None."""
        return self.named if self.named is not None and self.named.is_adapter else None

    @cached_property
    def base(self) -> Source | None:
        """Source of the model in `--from_pretrained`, or of the base model of the adapter there."""
        return self.named if self.adapter is None else find_base(self.adapter)

    @cached_property
    def configuration(self) -> Source:
        """Source whose config.json describes the model; not for `--model_cfg`."""
        args = self.args
        return self.base or find_source(args.base_model or args.init_checkpoint, "--base_model or --init_checkpoint")

    @property
    def tokenizer_flag(self) -> tuple[str, str]:
        """The flag that determines the tokenizer, and its value. Raises UserError."""
        for flag in ("tokenizer", "from_pretrained", "init_checkpoint"):
            if value := getattr(self.args, flag):
                return f"--{flag}", value
        raise UserError("--model_cfg brings no tokenizer: name one with --tokenizer (a folder or a .model file).")

    @cached_property
    def tokenizer(self) -> Source:
        """Source of the tokenizer: for a weights file its folder, for an adapter without tokenizer its base model."""
        flag, name = self.tokenizer_flag
        path, is_named = Path(name), flag == "--from_pretrained"
        if any(file.is_file() for pattern in _TOKENIZER_FILES for file in path.glob(pattern)):
            verify_model(path)
            has_config = is_named and (path / CONFIG).is_file()
            return self.named if has_config and self.named.path == path else Source(name, path)
        source = self.named if is_named else find_source(name, flag)
        if source.is_adapter and not any(source.path.glob("tokenizer*")):
            source = self.base if is_named else find_base(source)
        return Source(str(source.path.parent), source.path.parent) if source.is_file else source
