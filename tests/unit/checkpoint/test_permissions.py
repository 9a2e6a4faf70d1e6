"""Files of checkpoints and tokens have the permissions of any other new file: colleagues can read them."""

from __future__ import annotations

import os
import stat

import pytest

from tests.helpers.loops import make_loop
from tests.helpers.token_toys import write_tokens
from tests.helpers.toys import tiny_t5


@pytest.fixture(params=[0o027, 0o002])
def mode(request):
    """Of new files, under some umask."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(folder):
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_colleague_can_read_every_file_of_a_run(tmp_path, mode):
    make_loop(tiny_t5(), iters=1, model_path=tmp_path).train()
    found = modes(tmp_path)
    assert {"model.safetensors", "optimizer.safetensors", "trainer_state.safetensors", "manifest.json"} <= found.keys()
    assert set(found.values()) == {mode}, found


def test_a_colleague_can_read_token_files(tmp_path, mode):
    write_tokens(tmp_path / "tokens", [[[1, 2, 3]], [[4, 5]]])
    assert set(modes(tmp_path).values()) == {mode} and modes(tmp_path).keys() >= {"tokens.bin", "tokens.idx"}
