"""Ways in which a checkpoint comes to be damaged, and what has to be said of each."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.checkpoint_toys import flip

Damage = Callable[[Path], None]
DATA = "trainer_state.safetensors"
UNREADABLE: set[Path] = set()  # files whose opening `refuse_to_open` fails; root reads everything, whatever chmod says


def refuse_to_open(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `open` that gives no access to UNREADABLE."""

    def refuse(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, Path)) and Path(file) in UNREADABLE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return original(file, *args, **kwargs)

    return refuse


def truncate(name: str, fraction: float) -> Damage:
    def damage(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: int(len(content) * fraction)])

    return damage


def edit_manifest(**changes: Any) -> Damage:
    """A manifest that is consistent with itself, as an attacker or a newer release would write it."""

    def damage(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        for key, value in changes.items():
            manifest[key] = value(manifest[key]) if callable(value) else value
        manifest["manifest_sha256"] = "0" * 64
        text = json.dumps(manifest)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (path / "manifest.json").write_text(text.replace("0" * 64, digest))

    return damage


def with_file(name: str) -> Damage:
    return edit_manifest(files=lambda files: files | {name: {"size": 1, "sha256": "1" * 64}})


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def replace_by_link(name: str) -> Damage:
    def damage(path: Path) -> None:
        outside = path.parent / f"outside_{path.name}"
        shutil.move(path / name, outside)
        (path / name).symlink_to(outside)

    return damage


def replace_by_pipe(name: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


def swap(one: str, other: str) -> Damage:
    def damage(path: Path) -> None:
        content = (path / one).read_bytes()
        (path / one).write_bytes((path / other).read_bytes())
        (path / other).write_bytes(content)

    return damage


def take_from_another(name: str) -> Damage:
    return lambda path: shutil.copy(path.parent / "step_000002" / name, path / name)


def unreadable(name: str) -> Damage:
    return lambda path: UNREADABLE.add(path / name)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def take_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / "step_000002", path)


def add_file(path: Path) -> None:
    (path / "rng" / "extra.bin").write_bytes(b"x")


def link_nested_directory(path: Path) -> None:
    elsewhere = path.parent / f"elsewhere_{path.name}"
    shutil.move(path / "rng", elsewhere)
    (path / "rng").symlink_to(elsewhere)


def become_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a directory")


# names in a manifest that are no file of the checkpoint: none is ever opened
STRANGE_NAMES = {
    "name with ..": "../../../etc/passwd",
    "absolute name": "/etc/passwd",
    "NUL name": "a\0b",
    "name that is no text": "\ud800",
    "name too long": "x" * 300,
}
# kind -> what it does to the directory of a step from the fourth on, and what has to be said
DAMAGE: dict[str, tuple[Damage, str]] = {
    "truncated to 0": (truncate(DATA, 0), f"{DATA} does not match"),
    "truncated to 50 %": (truncate("optimizer.safetensors", 0.5), "optimizer.safetensors does not match"),
    "bit flip in the middle": (flip("model.safetensors", 0.5), "model.safetensors does not match its sha256"),
    "bit flip in optimizer.json": (flip("optimizer.json", 0.5), "optimizer.json does not match"),
    "bit flip in trainer_state.json": (flip("trainer_state.json", 0.5), "trainer_state.json does not match"),
    "bit flip in config.json": (flip("config.json", 0.5), "config.json does not match"),
    "bit flip in a nested file": (flip("rng/rank0.safetensors", 0.9), "rng/rank0.safetensors does not match"),
    "manifest truncated to 0": (truncate("manifest.json", 0), "manifest.json is not valid JSON"),
    "manifest missing": (remove("manifest.json"), "manifest.json is missing|lost its manifest.json"),
    "manifest of another format": (edit_manifest(format="other"), "not a manifest of this project"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest of this project"),
    "manifest of another step": (take_from_another("manifest.json"), "manifest.json is of step 2"),
    "weights missing": (remove("model.safetensors"), "model.safetensors is missing|has no weights"),
    "optimizer missing": (remove("optimizer.safetensors"), "optimizer.safetensors (is missing|cannot be read)"),
    "state missing": (remove(DATA), f"{DATA} is missing|has no {DATA}"),
    "nested file missing": (remove("rng/rank0.json"), "rng/rank0.json is missing"),
    "empty directory": (empty, "manifest.json is missing|has no weights|neither config.json nor"),
    "files swapped": (swap("model.safetensors", "optimizer.safetensors"), "safetensors does not match its sha256"),
    "rank files swapped": (
        swap("rng/rank0.safetensors", "rng/rank1.safetensors"),
        "rng/rank0.safetensors does not match",
    ),
    "weights of another step": (take_from_another("model.safetensors"), "model.safetensors does not match its sha256"),
    "another step's directory": (take_another_step, "manifest.json is of step 2, the directory is not"),
    "wrong step in manifest": (edit_manifest(step=1), "manifest.json is of step 1"),
    "future version": (edit_manifest(format_version=2), "format version 2; this release reads"),
    "extra file": (add_file, "rng/extra.bin is not in the manifest"),
    "extra link": (lambda p: (p / "link").symlink_to("/etc"), "link is not in the manifest"),
    "unreadable weights": (unreadable("model.safetensors"), r"model.safetensors cannot be read \(Permission denied\)"),
    "unreadable manifest": (unreadable("manifest.json"), r"manifest.json cannot be read \(Permission denied\)"),
    "file a link to outside": (replace_by_link("model.safetensors"), "model.safetensors is not a regular file"),
    "directory a link to outside": (link_nested_directory, "rng is not in the manifest|rng/rank0.json is missing"),
    "file a pipe": (replace_by_pipe("model.safetensors"), "model.safetensors is not a regular file|has no weights"),
    "checkpoint a file": (become_file, "it is not a directory|no such|cannot be read|weights alone"),
    **{kind: (with_file(name), "is missing") for kind, name in STRANGE_NAMES.items()},
}
# flag -> kinds that are harmless to it: it reads no state of training, or no description of the model
_BESIDE = {"extra file", "extra link"}
UNREAD = {
    "--from_pretrained": _BESIDE
    | {"truncated to 0", "truncated to 50 %", "bit flip in optimizer.json", "bit flip in trainer_state.json"}
    | {"optimizer missing", "state missing"},
    "--init_checkpoint": _BESIDE
    | {"bit flip in config.json", "rank files swapped", "bit flip in a nested file", "nested file missing"}
    | {"directory a link to outside", *STRANGE_NAMES},
}
