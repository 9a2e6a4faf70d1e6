"""Checkpoints: every kind of damage is named, and the one before it used."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from lm_experiments_tools.checkpoint.writer import CheckpointDamaged, find_newest_valid, verify
from lm_experiments_tools.errors import UserError
from tests.helpers.checkpoint_toys import flip, write

DATA = "trainer_state.safetensors"


def truncate(name: str, fraction: float | None):
    def damage(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: 1 if fraction is None else int(len(content) * fraction)])

    return damage


def edit_manifest(**changes):
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


def with_file(name: str):
    return edit_manifest(files=lambda files: files | {name: {"size": 1, "sha256": "1" * 64}})


def remove(name: str):
    return lambda path: (path / name).unlink()


def replace_by_link(name: str):
    def damage(path: Path) -> None:
        outside = path.parent / "outside"
        shutil.move(path / name, outside)
        (path / name).symlink_to(outside)

    return damage


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def swap_files(path: Path) -> None:
    a, b = path / DATA, path / "rng" / "rank0.safetensors"
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def take_file_of_another_step(path: Path) -> None:
    shutil.copy(path.parent / "step_000100" / DATA, path / DATA)


def take_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / "step_000100", path)


def misname(path: Path) -> None:
    path.rename(path.with_name("step_200"))


def add_file(path: Path) -> None:
    (path / "rng" / "extra.bin").write_bytes(b"x")


def add_link(path: Path) -> None:
    (path / "link").symlink_to("/etc")


def directory_for_file(path: Path) -> None:
    (path / DATA).unlink()
    (path / DATA).mkdir()


def link_nested_directory(path: Path) -> None:
    shutil.move(path / "rng", path.parent / "elsewhere")
    (path / "rng").symlink_to(path.parent / "elsewhere")


def become_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a directory")


def become_link(path: Path) -> None:
    shutil.move(path, path.parent / "moved")
    path.symlink_to(path.parent / "moved")


DAMAGE = {
    "truncated to 0": (truncate(DATA, 0), f"{DATA} has 0 bytes"),
    "truncated to 1 byte": (truncate(DATA, None), f"{DATA} has 1 bytes"),
    "truncated to 50 %": (truncate(DATA, 0.5), f"{DATA} has .* bytes"),
    "truncated to 99 %": (truncate(DATA, 0.99), f"{DATA} has .* bytes"),
    "bit flip at the start": (flip(DATA, 0), f"{DATA} does not match its sha256"),
    "bit flip in the middle": (flip(DATA, 0.5), f"{DATA} does not match its sha256"),
    "bit flip at the end": (flip(DATA, 1), f"{DATA} does not match its sha256"),
    "bit flip in json": (flip("trainer_state.json", 0.5), "trainer_state.json does not match"),
    "bit flip in a nested file": (flip("rng/rank0.safetensors", 0.9), "rng/rank0.safetensors does not match"),
    "bit flip in a nested json": (flip("rng/rank0.json", 0.5), "rng/rank0.json does not match"),
    "manifest truncated to 0": (truncate("manifest.json", 0), "manifest.json is not valid JSON"),
    "manifest truncated to 50 %": (truncate("manifest.json", 0.5), "manifest.json is not valid JSON"),
    "manifest missing": (remove("manifest.json"), "manifest.json is missing"),
    "manifest of another format": (edit_manifest(format="other"), "not a manifest of this project"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest of this project"),
    "manifest without files": (edit_manifest(files=[]), "lists no files"),
    "file missing": (remove(DATA), f"{DATA} is missing"),
    "nested file missing": (remove("rng/rank0.json"), "rng/rank0.json is missing"),
    "nested directory missing": (lambda p: shutil.rmtree(p / "rng"), "rng/rank0.json is missing"),
    "empty directory": (empty, "the directory is empty"),
    "files swapped": (swap_files, "safetensors has .* bytes, .* were written"),
    "file of another step": (take_file_of_another_step, f"{DATA} does not match its sha256"),
    "another step's directory": (take_another_step, "manifest.json is of step 100, the directory is not"),
    "wrong step in manifest": (edit_manifest(step=100), "manifest.json is of step 100"),
    "misnamed": (misname, "its name is not step_NNNNNN"),
    "future version": (edit_manifest(format_version=2), "format version 2; this release reads up to 1"),
    "version a string": (edit_manifest(format_version="1"), "format version 1;"),
    "extra file": (add_file, "rng/extra.bin is not in the manifest"),
    "extra link": (add_link, "link is not in the manifest"),
    "file a link to outside": (replace_by_link(DATA), f"{DATA} is a symbolic link"),
    "manifest a link": (replace_by_link("manifest.json"), "manifest.json is a symbolic link"),
    "directory a link to outside": (link_nested_directory, "rng/rank0.json is a symbolic link"),
    "directory for a file": (directory_for_file, f"{DATA} is not a regular file"),
    "checkpoint a file": (become_file, "it is not a directory"),
    "checkpoint a link": (become_link, "it is a symbolic link"),
    "name with ..": (with_file("../../../etc/passwd"), "'../../../etc/passwd', which is not inside"),
    "name with inner ..": (with_file("a/../../b"), "which is not inside"),
    "absolute name": (with_file("/etc/passwd"), "'/etc/passwd', which is not inside"),
    "backslash name": (with_file("..\\x"), "which is not inside"),
    "drive name": (with_file("C:x"), "which is not inside"),
    "NUL name": (with_file("a\0b"), "which is not inside"),
    "dot name": (with_file("./a"), "which is not inside"),
    "empty name": (with_file(""), "which is not inside"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_used(tmp_path, kind):
    damage, reason = DAMAGE[kind]
    write(tmp_path, 100)
    damage(write(tmp_path, 200))
    warnings: list[str] = []
    assert find_newest_valid(tmp_path, warnings.append) == tmp_path / "step_000100"
    assert len(warnings) == 1 and "step_" in warnings[0], warnings
    assert re.search(reason, warnings[0]), warnings[0]
    shutil.rmtree(tmp_path / "step_000100")
    with pytest.raises(UserError, match=r"none of the 1 checkpoints .*another --model_path"):
        find_newest_valid(tmp_path, warnings.append)


def test_every_single_bit_of_the_manifest_is_guarded(tmp_path):
    path = write(tmp_path, 3)
    manifest = path / "manifest.json"
    content = manifest.read_bytes()
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        manifest.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
            verify(path)
    manifest.write_bytes(content)
    verify(path)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, 3)
    target = path / DATA
    original = open

    def refuse(file, *args, **kwargs):
        if Path(file) == target:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return original(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)  # root reads everything, so chmod would prove nothing
    with pytest.raises(CheckpointDamaged, match=rf"{DATA} cannot be read \(Permission denied\)"):
        verify(path)


def test_two_damaged_in_a_row_and_none_at_all(tmp_path):
    assert find_newest_valid(tmp_path / "absent", pytest.fail) is None
    assert find_newest_valid(tmp_path, pytest.fail) is None
    for step in (1, 2, 3):
        write(tmp_path, step)
    flip(DATA, 0.5)(tmp_path / "step_000003")
    remove(DATA)(tmp_path / "step_000002")
    warnings: list[str] = []
    assert find_newest_valid(tmp_path, warnings.append).name == "step_000001"
    assert "step_000003" in warnings[0] and "step_000002" in warnings[1]
    truncate("manifest.json", 0.5)(tmp_path / "step_000001")
    with pytest.raises(UserError) as error:
        find_newest_valid(tmp_path, warnings.append)
    assert all(f"step_00000{i}: " in str(error.value) for i in (1, 2, 3))
