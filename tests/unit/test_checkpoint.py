"""Checkpoints: bit-exact state, atomic commits, every kind of damage named, Hugging Face layout without loss."""

from __future__ import annotations

import builtins
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lm_experiments_tools import checkpoint
from lm_experiments_tools.checkpoint import (
    CheckpointDamaged,
    CheckpointWriteError,
    CheckpointWriter,
    find_newest_valid,
    load_tree,
    load_weights,
    read_manifest,
    save_model,
    save_tree,
    verify,
)
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import build_model


def write(root: Path, step: int, *, keep: int | None = None, best: bool = False, seed: int | None = None) -> Path:
    """A small committed checkpoint with a nested file."""
    writer = CheckpointWriter(root, keep)
    directory = writer.begin(step)
    generator = torch.Generator().manual_seed(step if seed is None else seed)
    save_tree(directory / "trainer_state", {"step": step, "weights": torch.randn(50, generator=generator)})
    (directory / "rng").mkdir()
    save_tree(directory / "rng" / "rank0", {"torch": torch.arange(8, dtype=torch.uint8)})
    return writer.commit(step, is_best=best, extra_manifest={"world_size": 2})


# ---- trees --------------------------------------------------------------------------------------------------------


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [(type(k), str(k)) for k in a] == [(type(k), str(k)) for k in b] and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a.hex() == b.hex() if isinstance(a, float) else a == b


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_tree_round_trip_is_bit_exact(tmp_path):
    tree = {
        "scalars": [
            None,
            True,
            False,
            0,
            -1,
            2**70,
            0.1,
            -0.0,
            5e-324,
            math.inf,
            -math.inf,
            math.nan,
            "é\n\u2028",
            "",
        ],
        "keys": {0: "int", "0": "str", None: 1, True: 2, 1.5: 3, math.inf: 4},
        "order": {"b": 1, "a": 2},
        "tags": {"$tensor": "not a tensor", "$dict": {"$tuple": [1]}},
        "tuples": (1, (2.0, ()), [(), []], {}),
        "deep": {"a": {"b": [{"c": torch.tensor(3)}]}},
    }
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        tree[str(dtype)] = torch.randn(3, 5).to(dtype)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16):
        tree[str(dtype)] = torch.randint(0, 2, (7,)).to(dtype)
    tree["special"] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    tree["shapes"] = [torch.zeros(()), torch.zeros(0), torch.zeros(2, 0, 3)]
    save_tree(tmp_path / "state.v1", tree)
    assert {file.name for file in tmp_path.iterdir()} == {"state.v1.json", "state.v1.safetensors"}
    json.loads((tmp_path / "state.v1.json").read_text(), parse_constant=pytest.fail)  # strict: no NaN or Infinity
    assert same(load_tree(tmp_path / "state.v1"), tree)


def test_tree_takes_shared_and_strided_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    once = torch.ones(2)
    tree = {"t": base.t(), "row": base[1], "step": base[:, ::2], "twice": [once, once], "p": torch.nn.Parameter(base)}
    tree["expanded"] = torch.ones(1).expand(5)
    save_tree(tmp_path / "s", tree)
    loaded = load_tree(tmp_path / "s")
    for name in ("t", "row", "step", "expanded", "p"):
        assert torch.equal(loaded[name], tree[name]) and not loaded[name].requires_grad
    assert loaded["twice"][0] is loaded["twice"][1]
    loaded["t"].zero_()
    assert loaded["row"].sum() == base[1].sum()


def test_tree_takes_numpy_and_random_states(tmp_path):
    random.seed(5)
    np.random.seed(5)
    tree = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    tree |= {"f4": np.float32(0.1), "f8": np.float64("nan"), "i": np.int64(3), "b": np.bool_(True)}
    tree |= {"big_endian": np.arange(3, dtype=">i4"), "od": OrderedDict(x=1)}
    save_tree(tmp_path / "s", tree)
    loaded = load_tree(tmp_path / "s")
    assert type(loaded["f4"]) is float and loaded["f4"] == float(np.float32(0.1)) and math.isnan(loaded["f8"])
    assert (type(loaded["i"]), type(loaded["b"]), loaded["od"]) == (int, bool, {"x": 1})
    assert loaded["big_endian"].tolist() == [0, 1, 2]
    expected = random.random(), np.random.rand(), torch.rand(3)
    random.setstate(loaded["python"])
    name, keys, *rest = loaded["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(loaded["torch"])
    assert (random.random(), np.random.rand()) == expected[:2] and torch.equal(torch.rand(3), expected[2])


class Odd:
    pass


@pytest.mark.parametrize(
    "leaf",
    [Odd(), {1, 2}, b"bytes", 1j, Path("x"), torch.float32, torch.zeros(2, device="meta"), lambda: 0, signal.SIGTERM]
    + [torch.eye(2).to_sparse(), np.array(["a"]), np.array([None]), np.ma.masked_array([1, 2], [0, 1])]
    + [{(1, 2): 3}, torch.zeros(1, dtype=torch.complex128), np.datetime64("2020-01-01")],
    ids=repr,
)
def test_tree_refuses_by_place(tmp_path, leaf):
    with pytest.raises(TypeError, match=r"\['optimizer'\]\['state'\]\[0\]\[1\]"):
        save_tree(tmp_path / "s", {"optimizer": {"state": {0: [1, leaf]}}})
    assert not (tmp_path / "s.json").exists()


def test_optimizer_state_round_trip_continues_identically(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    step(model, optimizer)
    save_tree(tmp_path / "s", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)
    other = torch.nn.Linear(4, 3)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=9.0)
    state = load_tree(tmp_path / "s")
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    step(other, other_optimizer)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def test_loaded_tree_outlives_its_files(tmp_path):
    save_tree(tmp_path / "s", {"a": torch.arange(100_000)})
    tree = load_tree(tmp_path / "s")
    (tmp_path / "s.safetensors").write_bytes(b"")  # a memory map of it would now end the process with SIGBUS
    assert int(tree["a"].sum()) == 99_999 * 50_000


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00garbage", b"{}"])
def test_damaged_tree_is_one_sentence(tmp_path, suffix, content):
    save_tree(tmp_path / "s", {"a": torch.zeros(3)})
    file = tmp_path / f"s.{suffix}"
    file.unlink() if content is None else file.write_bytes(content)
    if suffix == "json" and content == b"{}":
        assert load_tree(tmp_path / "s") == {}  # valid on its own; the manifest's sha256 is what guards it
        return
    with pytest.raises(UserError, match=file.name):
        load_tree(tmp_path / "s")


# ---- writing ------------------------------------------------------------------------------------------------------


def test_commit_gives_verified_directory_links_and_manifest(tmp_path):
    path = write(tmp_path, 500, best=True)
    assert path.name == "step_000500"
    verify(path)
    manifest = read_manifest(path)
    assert manifest["step"] == 500 and manifest["is_best"] and manifest["extra"] == {"world_size": 2}
    assert set(manifest["files"]) == {
        f"{stem}.{suffix}" for stem in ("trainer_state", "rng/rank0") for suffix in ("json", "safetensors")
    }
    for name in ("last", "best"):
        assert os.readlink(tmp_path / name) == "step_000500"
        verify(tmp_path / name)
    shutil.move(tmp_path, moved := tmp_path.with_name("moved"))
    verify(moved / "last")


def test_pruning_keeps_newest_best_and_last(tmp_path):
    for step in (100, 200, 300, 400, 500):
        write(tmp_path, step, keep=2, best=step == 200)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000200", "step_000400", "step_000500"]
    assert os.readlink(tmp_path / "best") == "step_000200" and os.readlink(tmp_path / "last") == "step_000500"
    write(tmp_path, 600, keep=1, best=True)
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_000600"]
    with pytest.raises(UserError, match="at least 1"):
        CheckpointWriter(tmp_path, 0)


def test_pruning_waits_for_the_commit(tmp_path):
    write(tmp_path, 1, keep=1)
    CheckpointWriter(tmp_path, 1).begin(2)
    verify(tmp_path / "step_000001")


def test_same_step_is_replaced(tmp_path):
    write(tmp_path, 7, seed=1)
    path = write(tmp_path, 7, seed=2)
    verify(path)
    expected = torch.randn(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(load_tree(path / "trainer_state")["weights"], expected)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000007", "last"}


def test_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    write(tmp_path, 6)
    path = write(tmp_path, 7)
    os.rename(path, tmp_path / ".old-step_000007")
    assert find_newest_valid(tmp_path, pytest.fail) is not None
    writer = CheckpointWriter(tmp_path, None)
    writer.begin(8)
    verify(path)


def test_going_back_sets_later_checkpoints_aside(tmp_path, caplog):
    for step in (100, 200, 300):
        write(tmp_path, step, keep=2, best=step == 300)
    write(tmp_path, 250, keep=2)  # continued from 200
    assert find_newest_valid(tmp_path, pytest.fail).name == "step_000250"
    assert (tmp_path / "superseded-step_000300").is_dir() and "step_000300" in caplog.text
    assert os.readlink(tmp_path / "last") == "step_000250" and not (tmp_path / "best").exists()


def test_other_ranks_get_the_path_and_touch_nothing(tmp_path):
    first, second = CheckpointWriter(tmp_path, 1, rank=0), CheckpointWriter(tmp_path, 1, rank=1)
    directory = first.begin(3)
    (directory / "from_rank_0").write_text("x")
    assert second.begin(3) == directory and (directory / "from_rank_0").exists()
    second.abort(3)
    assert directory.exists()
    with pytest.raises(ValueError, match="rank 0"):
        second.commit(3, is_best=False)


def test_stale_temporaries_are_cleared(tmp_path):
    stale = CheckpointWriter(tmp_path, None).begin(3)
    (stale / "half").write_text("x")
    assert find_newest_valid(tmp_path, pytest.fail) is None
    directory = CheckpointWriter(tmp_path, None).begin(4)
    assert not stale.exists() and directory.exists()


def failing(number: int, after: int):
    """A stand-in for an os function that raises OSError(number) at its `after`-th call."""

    def wrap(original):
        calls = [0]

        def wrapped(*args, **kwargs):
            calls[0] += 1
            if calls[0] == after:
                raise OSError(number, os.strerror(number), str(args[0]))
            return original(*args, **kwargs)

        return wrapped

    return wrap


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("function", ["fsync", "replace", "rename", "open"])
def test_write_fault_at_every_call_leaves_the_previous_checkpoint(tmp_path, monkeypatch, number, function):
    write(tmp_path, 1)
    faults = 0
    for after in range(1, 40):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing(number, after)(getattr(os, function)))
            writer = CheckpointWriter(tmp_path, None)
            try:
                directory = writer.begin(2)
                with writer.guarded(2):
                    save_tree(directory / "trainer_state", {"x": torch.zeros(9)})
                writer.commit(2, is_best=False)
            except CheckpointWriteError as error:
                faults += 1
                assert error.errno == number and "earlier checkpoints" in str(error) and "free" in str(error)
        newest = find_newest_valid(tmp_path, pytest.fail)
        if newest.name == "step_000002":  # the fault came after the rename: the new one is whole
            shutil.rmtree(newest)
        verify(tmp_path / "step_000001")
        assert not list(tmp_path.glob(".tmp-step_*")), after
    assert faults >= 1


def test_real_write_errors_of_safetensors_become_one_sentence(tmp_path):
    """A file size limit makes the kernel itself refuse (EFBIG), inside safetensors and inside save_pretrained."""
    write(tmp_path, 1)
    script = f"""
import resource, signal, torch
from pathlib import Path
from lm_experiments_tools.checkpoint import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for save in (lambda d: save_tree(d / "s", torch.zeros(10**6)), lambda d: save_model(d, torch.nn.Linear(1000, 1000))):
    writer = CheckpointWriter(Path({str(tmp_path)!r}), None)
    directory = writer.begin(2)
    try:
        with writer.guarded(2):
            save(directory)
    except CheckpointWriteError as error:
        print(error.errno, directory.exists(), error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"{errno.EFBIG} False ") for line in lines), result.stdout
    verify(tmp_path / "step_000001")


def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    write(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointWriteError, match=r"step 2 .*No space left.* needed, 100 B \(100 bytes\) free"):
        CheckpointWriter(tmp_path, None).begin(2)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001", "last"}


def test_kill_at_any_moment_of_saving_leaves_a_readable_checkpoint(tmp_path):
    """A child saves without pause and is killed at 40 random moments within its first saves; the next goes on."""
    script = """
import sys, torch
from pathlib import Path
from lm_experiments_tools.checkpoint import *
root = Path(sys.argv[1])
import os, random, time, signal

def save(step):
    writer = CheckpointWriter(root, 2)
    directory = writer.begin(step)
    save_tree(directory / "trainer_state", {"step": step, "x": torch.full((200_000,), float(step))})
    save_tree(directory / "rank1", {"y": torch.full((1000,), float(step))})
    writer.commit(step, is_best=step % 3 == 0)

start = time.perf_counter()
for step in range(1, 6):
    save(step)
seconds = (time.perf_counter() - start) / 5
print("ready", flush=True)
while True:
    child = os.fork()
    if child == 0:
        while True:
            step += random.choice((0, 1))
            save(step)
    line = sys.stdin.readline()
    if not line: break
    time.sleep(float(line) * seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    newest = find_newest_valid(root, lambda message: print("DAMAGED", message))
    tree = load_tree(newest / "trainer_state")
    good = bool((tree["x"] == tree["step"]).all()) and bool((load_tree(newest / "rank1")["y"] == tree["step"]).all())
    interrupted = any(p.name.startswith((".tmp", ".old")) for p in root.iterdir())
    print(int(good), tree["step"], int(interrupted), flush=True)
    step = tree["step"]
os.kill(child, signal.SIGKILL)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout.readline() == "ready\n"
    generator, steps, interrupted = random.Random(0), [0], 0
    for _ in range(40):
        child.stdin.write(f"{generator.uniform(0.0, 4.0)}\n")
        child.stdin.flush()
        good, step, torn = (int(word) for word in child.stdout.readline().split())
        assert good == 1 and step >= steps[-1]
        steps.append(step)
        interrupted += torn
    child.stdin.close()
    child.wait(timeout=20)
    assert steps[-1] > 8, "the child hardly saved anything"
    assert interrupted >= 10, f"only {interrupted} of 40 kills landed inside a save"


# ---- damage -------------------------------------------------------------------------------------------------------

DATA = "trainer_state.safetensors"


def truncate(name: str, fraction: float | None):
    def damage(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: 1 if fraction is None else int(len(content) * fraction)])

    return damage


def flip(name: str, where: float):
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int((len(content) - 1) * where)] ^= 4
        (path / name).write_bytes(content)

    return damage


def edit_manifest(**changes):
    """A manifest that is consistent with itself, as an attacker or a newer release would write it."""

    def damage(path: Path) -> None:
        import hashlib

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


# ---- model weights ------------------------------------------------------------------------------------------------


def tiny_t5(*, tied: bool = True, seed: int = 0, **changes):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    config = transformers.T5Config(**{"feed_forward_proj": "relu" if tied else "gated-gelu", **sizes, **changes})
    if not tied:  # after construction: T5Config forces it back to True
        config.tie_word_embeddings = config.scale_decoder_outputs = False
    model = build_model(transformers.T5ForConditionalGeneration, config, seed=seed).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # T5's own initialisation has zeros and ones that hide a lost weight
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def logits(model) -> torch.Tensor:
    inputs = torch.arange(2, 34).reshape(2, 16)
    with torch.no_grad():
        return model(input_ids=inputs, labels=inputs[:, :8].contiguous()).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gathered", [False, True])
def test_saved_model_loads_with_from_pretrained_without_difference(tmp_path, tied, gathered):
    transformers = pytest.importorskip("transformers")
    model = tiny_t5(tied=tied)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} if gathered else None
    save_model(tmp_path, model, state_dict=state)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (loaded.lm_head.weight is loaded.shared.weight) == tied
    assert (logits(loaded) - logits(model)).abs().max() == 0
    stored = load_file(tmp_path / "model.safetensors")
    assert sum("embed_tokens" in name or "lm_head" in name for name in stored) == (0 if tied else 1)
    assert (tmp_path / "generation_config.json").exists()
    other = tiny_t5(tied=tied, seed=1)
    report = load_weights(other, tmp_path)
    assert not report.missing and not report.unexpected and (logits(other) - logits(model)).abs().max() == 0


def test_saving_does_not_import_deepspeed(tmp_path, monkeypatch):
    """accelerate, which save_pretrained asks, would: 2 s, and a warning where there is no GPU."""
    pytest.importorskip("accelerate")
    model, original, imported = tiny_t5(), builtins.__import__, []

    def note(name, *args, **more):
        imported.append(name)
        return original(name, *args, **more)

    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", note)
    save_model(tmp_path, model)
    assert imported and not [name for name in imported if name.startswith("deepspeed")]


def test_tokenizer_and_generation_config_are_stored(tmp_path):
    transformers = pytest.importorskip("transformers")
    source, target = tmp_path / "tokenizer", tmp_path / "model"
    source.mkdir(), target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "spiece.model", "config.json", "model.safetensors"):
        (source / name).write_text(name)
    save_model(target, tiny_t5(), tokenizer_dir=source, generation_config=transformers.GenerationConfig(num_beams=3))
    assert (target / "spiece.model").read_text() == "spiece.model"
    assert json.loads((target / "config.json").read_text())["model_type"] == "t5"
    assert json.loads((target / "generation_config.json").read_text())["num_beams"] == 3
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no tokenizer files"):
        save_model(target, tiny_t5(), tokenizer_dir=tmp_path / "none")


class Plain(torch.nn.Module):
    """No save_pretrained; a tied weight and a strided view."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("view", torch.arange(12.0).reshape(3, 4).t())


def test_plain_model_round_trip(tmp_path):
    model, other = Plain(), Plain()
    save_model(tmp_path, model)
    assert set(load_file(tmp_path / "model.safetensors")) == {"a.weight", "view"}
    assert load_weights(other, tmp_path).missing == []
    assert torch.equal(other.b.weight, model.a.weight) and other.b.weight is other.a.weight


def test_sharded_hugging_face_directory_loads(tmp_path):
    model, other = tiny_t5(), tiny_t5(seed=1)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    load_weights(other, tmp_path)
    assert torch.equal(logits(model), logits(other))
    index = tmp_path / "model.safetensors.index.json"
    content = index.read_text()
    index.write_text(content.replace("model-00001", "../model-00001"))
    with pytest.raises(UserError, match="outside its directory"):
        load_weights(other, tmp_path)
    index.write_text(content)
    next(tmp_path.glob("model-00001*")).unlink()
    with pytest.raises(UserError, match="is missing"):
        load_weights(other, tmp_path)


def test_strict_loading_lists_what_does_not_fit(tmp_path):
    model = tiny_t5()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed" not in name}
    del weights["lm_head.weight"], weights["encoder.final_layer_norm.weight"]
    weights["bogus"] = torch.zeros(1)
    weights["decoder.final_layer_norm.weight"] = torch.zeros(5)
    save_file(weights, tmp_path / "w.safetensors")
    target = tiny_t5(seed=1)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_weights(target, tmp_path / "w.safetensors")
    text = str(error.value)
    for part in (
        "1 missing (encoder.final_layer_norm.weight)",
        "1 unexpected (bogus)",
        "decoder.final_layer_norm.weight: 5 in the file, 16 in the model",
        "--allow_partial_checkpoint",
    ):
        assert part in text, text
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items()), "not all or nothing"
    report = load_weights(target, tmp_path / "w.safetensors", allow_partial=True)
    assert report.missing == ["encoder.final_layer_norm.weight"] and report.unexpected == ["bogus"]
    assert report.mismatched == [("decoder.final_layer_norm.weight", (5,), (16,))]
    assert torch.equal(target.shared.weight, model.shared.weight)
    assert torch.equal(target.encoder.final_layer_norm.weight, before["encoder.final_layer_norm.weight"])


def test_nothing_in_common_is_refused_even_when_partial_is_allowed(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="no weight in .* fits the model"):
        load_weights(tiny_t5(), tmp_path / "w.safetensors", allow_partial=True)


def test_untied_weights_do_not_slip_into_a_tied_model(tmp_path):
    save_model(tmp_path, tiny_t5(tied=False))
    target = tiny_t5(tied=True, feed_forward_proj="gated-gelu")
    with pytest.raises(UserError, match=r"different values for .*tie_word_embeddings"):
        load_weights(target, tmp_path, allow_partial=True)


def test_tied_weights_do_not_silently_fill_an_untied_model(tmp_path):
    save_model(tmp_path, tiny_t5(tied=True, feed_forward_proj="gated-gelu"))
    target = tiny_t5(tied=False)
    with pytest.raises(UserError, match=r"1 missing \(lm_head\.weight\), 0 unexpected"):
        load_weights(target, tmp_path)


@pytest.mark.parametrize("content", [b"", b"1", b"\xff" * 30, None])
def test_corrupt_safetensors_is_one_sentence(tmp_path, content):
    save_model(tmp_path, tiny_t5())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10] if content is None else content)
    with pytest.raises(UserError, match="truncated or corrupt"):
        load_weights(tiny_t5(), tmp_path)


def test_sources_that_are_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_weights(tiny_t5(), tmp_path / "absent")
    with pytest.raises(UserError, match="has no weights"):
        load_weights(tiny_t5(), tmp_path)
    write(tmp_path, 1)
    with pytest.raises(UserError, match=r"looks like a run directory: give .*last"):
        load_weights(tiny_t5(), tmp_path)


def test_weights_of_our_checkpoint_are_checked_against_its_manifest(tmp_path):
    writer = CheckpointWriter(tmp_path, None)
    directory = writer.begin(4)
    save_model(directory, tiny_t5())
    save_tree(directory / "optimizer", {})
    path = writer.commit(4, is_best=True)
    thinned = path.rename(tmp_path / "for_a_colleague")  # renamed, without the optimizer: weights are still fine
    for name in ("optimizer.json", "optimizer.safetensors"):
        (thinned / name).unlink()
    load_weights(tiny_t5(seed=1), thinned)
    flip("model.safetensors", 0.9)(thinned)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors does not match"):
        load_weights(tiny_t5(seed=1), thinned)


def test_no_pickle_is_written(tmp_path):
    writer = CheckpointWriter(tmp_path, None)
    directory = writer.begin(1)
    save_model(directory, tiny_t5())
    save_tree(directory / "optimizer", {"a": torch.zeros(2)})
    path = writer.commit(1, is_best=False)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    assert checkpoint.__all__ == sorted(checkpoint.__all__)
    assert time.time() - path.stat().st_mtime < 60
