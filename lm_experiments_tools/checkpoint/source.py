"""Where pre-trained weights are: what the text after --from_pretrained names, on disk or on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lm_experiments_tools.checkpoint.manifest import MANIFEST, parse_step, read_manifest, sha256_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json

ADAPTER_CONFIG = "adapter_config.json"  # peft's name
ENSEMBLE_CONFIG = "prompt_ensemble.json"  # names the folders of its prompts, adapters each
LABELS_FILE = "label_names.json"  # beside the adapter of a classifier: config.json lies with its base
_SECONDS_TO_CONNECT = 5.0
# transformers' names, in the order in which it looks for them
_WEIGHTS_FILES = ("model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin")


@dataclass(frozen=True)
class Source:
    """Pre-trained weights.

    Attributes:
        name: a Hub name, or the path of a folder or file.
        path: None on the Hub.
        is_adapter: what peft saved, to be put on a base model.
    """

    name: str
    path: Path | None = None
    is_adapter: bool = False

    @property
    def is_file(self) -> bool:
        """Weights alone (t5-experiments, nanoT5), which do not say what model they are of."""
        return self.path is not None and self.path.is_file()

    @property
    def reference(self) -> str:
        """A name that holds in any working folder: the Hub's, or the path from the root."""
        return self.name if self.path is None else str(self.path.resolve())

    @property
    def base(self) -> str:
        """The base model that an adapter was trained on. Raises UserError."""
        name = read_json(self.base_named_in).get("base_model_name_or_path")
        if not name:
            raise UserError(f"{self.base_named_in} does not name its base_model_name_or_path: write it there.")
        return name

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels of a classifier in a folder, in the order of their numbers; empty where they have no names."""
        labels, config = (None if self.path is None else self.path / name for name in (LABELS_FILE, "config.json"))
        if self.path is None or not (labels if self.is_adapter else config).is_file():
            return ()
        if self.is_adapter:
            return tuple(read_json(labels)["label_names"])
        named = read_json(config).get("id2label") or {}
        return real_names({int(number): name for number, name in named.items()})

    def fingerprint(self) -> str | None:
        """sha256 of the weights (of several files: of their sha256, in the order of names); None where there are none.

        Nothing less tells weights of before and after some training apart: sizes, names and shapes are equal. It
        costs one reading, 1.4 GB/s and once a start, which is less than loading costs; the manifest of a checkpoint
        has it for nothing.
        """
        folder = self.path
        if folder is None:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(self.name, "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else None
        if folder is None or folder.is_file():
            return None if folder is None else sha256_of(folder)
        files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in _WEIGHTS_FILES)), [])
        known = read_manifest(folder)["files"] if (folder / MANIFEST).is_file() else {}
        sums = [known[file.name]["sha256"] if file.name in known else sha256_of(file) for file in files]
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest() if sums else None

    @property
    def base_named_in(self) -> Path:
        """The file in which an adapter names its base model."""
        folder = self.path
        if (folder / ENSEMBLE_CONFIG).is_file():
            folder = folder / read_json(folder / ENSEMBLE_CONFIG)["folders"][0]
        return folder / ADAPTER_CONFIG


def holds_adapter(path: Path) -> bool:
    """Whether a folder holds what peft saved, or several of these."""
    return (path / ADAPTER_CONFIG).is_file() or (path / ENSEMBLE_CONFIG).is_file()


def real_names(id2label: Mapping[int, str]) -> tuple[str, ...]:
    """The labels in the order of their numbers; empty where they are transformers' LABEL_0, LABEL_1, ..."""
    names = tuple(id2label[number] for number in sorted(id2label))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


def find_source(name: str, flag: str = "--from_pretrained") -> Source:
    """What `name` is: a folder (of a run: its best checkpoint, else its last), a weights file, or a Hub name.

    Raises:
        UserError: nothing of the kind is there, or the Hub cannot be reached.
    """
    path = Path(name)
    if path.is_file():
        return Source(name, path)
    if path.is_dir():
        return _folder(path, flag)
    if name.count("/") > 1 or name.startswith((".", "~", os.sep)) or path.suffix in (".pth", ".bin", ".safetensors"):
        raise UserError(f"{flag} {name}: there is no such file or folder.")
    check_reachable(name, flag)
    return Source(name)


def find_base(adapter: Source) -> Source:
    """The base model of an adapter.

    Raises:
        UserError: it is not there any more, or is an adapter itself.
    """
    name, file = adapter.base, adapter.base_named_in
    if os.path.isabs(name) and not os.path.exists(name):
        pruned = " (its run has pruned that checkpoint)" if parse_step(Path(name).name) is not None else ""
        raise UserError(
            f"the base model of the adapter {adapter.name} is gone: there is no {name}{pruned}; put it back, or, "
            f"where it lies elsewhere, write that path as base_model_name_or_path into {file}."
        )
    base = find_source(name, f"the base model that {file} names")
    if base.is_adapter:
        raise UserError(f"{adapter.name} was trained on another adapter, {base.name}: merge that one first.")
    return base


def _folder(path: Path, flag: str) -> Source:
    for link in ("best", "last"):  # first, for a run's own config.json holds its arguments
        if (path / link / "manifest.json").is_file():
            return _folder((path / link).resolve(), flag)
    if holds_adapter(path):
        return Source(str(path), path, is_adapter=True)
    if (path / "config.json").is_file():
        return Source(str(path), path)
    raise UserError(
        f"{flag} {path}: the folder has neither config.json nor {ADAPTER_CONFIG}, and is no run directory with a "
        "checkpoint (best, last): name a folder written by save_pretrained or by one of our runs."
    )


def check_reachable(name: str, flag: str) -> None:
    """Refuse at once what the Hub would be asked for in vain; without network its client tries for half a minute.

    Raises:
        UserError: no connection, and `name` was not downloaded before.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = any(isinstance(try_to_load_from_cache(name, f), str) for f in ("config.json", ADAPTER_CONFIG))
    except HFValidationError as error:
        raise UserError(f"{flag} {name}: there is no such folder, and no model of the Hub has such a name.") from error
    if cached or urllib.request.getproxies():
        return
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    reason = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else None
    if reason is None:
        try:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname, port), timeout=_SECONDS_TO_CONNECT).close()
        except OSError as error:
            reason = f"{address.hostname} cannot be reached: {error.strerror or error}"
    if reason is not None:
        raise UserError(
            f"{flag} {name}: there is no such folder here, it has not been downloaded from the Hugging Face Hub "
            f"before, and {reason}; copy the model to this machine and name its folder."
        )
