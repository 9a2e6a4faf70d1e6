"""Checkpoints: bit-exact state, atomic commits, no fault or kill that leaves half of one."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_experiments_tools.checkpoint.finding import find_newest_valid, find_resume
from lm_experiments_tools.checkpoint.manifest import named_checkpoint, read_manifest, verify
from lm_experiments_tools.checkpoint.source import find_source
from lm_experiments_tools.checkpoint.tree import load_tree, save_tree
from lm_experiments_tools.checkpoint.writer import CheckpointWriteError, CheckpointWriter
from lm_experiments_tools.errors import UserError
from tests.helpers.checkpoint_toys import flip, write
from tests.helpers.damage import remove

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
        "scalars": [None, True, False, 0, -1, 2**70, 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan],
        "texts": ["é\n\u2028", ""],
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
    ids=lambda leaf: type(leaf).__name__,
)
def test_tree_refuses_by_place(tmp_path, leaf):
    with pytest.raises(TypeError, match=r"\['optimizer'\]\['state'\]\[0\]\[1\]"):
        save_tree(tmp_path / "s", {"optimizer": {"state": {0: [1, leaf]}}})
    assert not (tmp_path / "s.json").exists()


def test_loaded_tree_outlives_its_files(tmp_path):
    save_tree(tmp_path / "s", {"a": torch.arange(100_000)})
    tree = load_tree(tmp_path / "s")
    (tmp_path / "s.safetensors").write_bytes(b"")  # a memory map of it would now end the process with SIGBUS
    assert int(tree["a"].sum()) == 99_999 * 50_000


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
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000600"]
    with pytest.raises(UserError, match="at least 1"):
        CheckpointWriter(tmp_path, 0)


@pytest.mark.parametrize("damage", [flip("manifest.json", 0.5), remove("manifest.json")])
def test_pruning_keeps_what_may_be_the_best(tmp_path, damage, caplog):
    writer = CheckpointWriter(tmp_path, 1)

    def save(step, *, best):
        writer.begin(step)
        writer.commit(step, is_best=best)

    save(1, best=True)
    save(2, best=False)
    damage(tmp_path / "step_000001")
    for step in (3, 4):
        save(step, best=False)
        assert os.readlink(tmp_path / "best") == "step_000001" and (tmp_path / "step_000001").is_dir()
    assert not (tmp_path / "step_000003").exists() and caplog.text.count("it may be the best one") == 1
    save(5, best=True)
    assert os.readlink(tmp_path / "best") == "step_000005"


def test_same_step_is_replaced(tmp_path):
    write(tmp_path, 7, seed=1)
    path = write(tmp_path, 7, seed=2)
    verify(path)
    expected = torch.randn(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(load_tree(path / "trainer_state")["weights"], expected)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000007", "last"}


def write_run(run, step, best=False):
    writer = CheckpointWriter(run / "checkpoints", None, run)
    (writer.begin(step) / "config.json").write_text("{}")
    return writer.commit(step, is_best=best)


def test_a_run_without_links_is_read_by_its_manifests(tmp_path, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)  # as S3 does
    run, expected = tmp_path / "run", {}
    for step in (10, 20, 30):
        expected["best" if step == 20 else "last"] = write_run(run, step, best=step == 20)
    assert not (run / "last").exists() and caplog.text.count("was not updated") == 5
    for name, path in expected.items():
        assert named_checkpoint(run / name) == path == find_resume(str(run / name), None)
        assert find_source(str(run / name)).path == path
    assert find_resume(str(run), None) == expected["last"] and find_source(str(run)).path == expected["best"]
    monkeypatch.undo()
    write_run(run, 40)
    assert os.readlink(run / "best") == "checkpoints/step_000020"


def test_copies_of_links_are_neither_read_nor_left_to_grow_old(tmp_path, caplog):
    for step in (10, 20):
        write_run(tmp_path / "run", step, best=step == 10)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")  # follows links, as `scp -r` and `cp -rL` do
    assert (copy / "last").is_dir() and not (copy / "last").is_symlink()
    newest = write_run(copy, 30, best=True)
    assert os.readlink(copy / "last") == os.readlink(copy / "best") == "checkpoints/step_000030"
    assert sorted(p.name for p in copy.iterdir() if "link" in p.name or "supers" in p.name) == [
        "superseded-best", "superseded-last",
    ]  # fmt: skip
    assert "last is a copy of a checkpoint where a link should be: renamed to superseded-last" in caplog.text
    stale = shutil.copytree(tmp_path / "run", tmp_path / "stale")
    shutil.copytree(newest, stale / "checkpoints" / newest.name)  # by a program that does not know of the copies
    for name in ("", "last", "best"):
        assert find_source(str(stale / name)).path.name == find_resume(str(stale / name), None).name == newest.name


def test_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path, caplog):
    write(tmp_path, 6)
    path = write(tmp_path, 7)
    earlier = path.rename(tmp_path / ".old-step_000007")
    assert find_newest_valid(tmp_path) == earlier and not caplog.messages
    for name in (tmp_path, tmp_path / "last", path):
        assert find_resume(str(name), None) == earlier
    with pytest.raises(UserError, match="no such checkpoint"):
        find_resume(str(tmp_path / "step_000003"), None)
    writer = CheckpointWriter(tmp_path, None)
    writer.begin(8)
    verify(path)


def test_going_back_sets_later_checkpoints_aside(tmp_path, caplog):
    for step in (100, 200, 300):
        write(tmp_path, step, keep=2, best=step == 300)
    write(tmp_path, 250, keep=2)  # continued from 200
    assert find_newest_valid(tmp_path).name == "step_000250" and "damaged" not in caplog.text
    assert (tmp_path / "superseded-step_000300").is_dir() and "step_000300" in caplog.text
    assert os.readlink(tmp_path / "last") == "step_000250" and not (tmp_path / "best").exists()


def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    write(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointWriteError, match=r"step 2 .*No space left.*\(100 B free\)"):
        CheckpointWriter(tmp_path, None).begin(2)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001", "last"}
