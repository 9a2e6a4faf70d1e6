"""Files of checkpoints and tokens have the permissions of any other new file: colleagues can read them."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from lm_experiments_tools.checkpoint.weights import save_model
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


def test_a_colleague_can_read_a_saved_adapter_and_a_model_without_save_pretrained(tmp_path, mode):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q"])
    for name, model in {"adapter": peft.get_peft_model(tiny_t5(), config), "plain": torch.nn.Linear(2, 2)}.items():
        (tmp_path / name).mkdir()
        save_model(tmp_path / name, model)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert set(modes(tmp_path).values()) == {mode}


def test_a_colleague_can_read_token_files(tmp_path, mode):
    write_tokens(tmp_path / "tokens", [[[1, 2, 3]], [[4, 5]]])
    assert set(modes(tmp_path).values()) == {mode} and modes(tmp_path).keys() >= {"tokens.bin", "tokens.idx"}
