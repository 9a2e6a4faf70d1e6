"""Checkpoints of t5-experiments and nanoT5: read without running code, strictly, and to the same logits."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_experiments_tools.checkpoint.legacy import (
    read_old_training_state,
    read_pickle,
    regrouped,
    write_old_checkpoint,
)
from lm_experiments_tools.checkpoint.weights import load_weights
from lm_experiments_tools.errors import UserError
from tests.helpers.checkpoint_toys import logits, random_t5

pytest.importorskip("transformers")


def write_ancestor(path: Path, model) -> torch.optim.Optimizer:
    """As t5-experiments' Trainer.save does: metrics are np.mean results."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    content = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "iteration": 1000,
        "epoch": 3,
        "metrics": {
            "loss": np.mean([1.0, 2.0]),
            "exact_match": np.float32(0.5),
            "n": np.int64(7),
            "t": torch.tensor(2.0),
        },
        "lr_scheduler_state_dict": {"last_epoch": 1001, "_last_lr": [np.float64(1e-3)]},
    }
    torch.save(content, path)
    return optimizer


@pytest.mark.parametrize("tied", [True, False])
def test_ancestor_checkpoint_gives_the_same_logits(tmp_path, tied):
    model = random_t5(0, tied=tied)
    optimizer = write_ancestor(tmp_path / "model_1000.pth", model)
    with pytest.raises(pickle.UnpicklingError):  # what the ancestor itself meets since torch 2.6
        torch.load(tmp_path / "model_1000.pth")
    other = random_t5(1, tied=tied)
    report = load_weights(other, tmp_path / "model_1000.pth")
    assert not report.missing and not report.unexpected
    assert (logits(other) - logits(model)).abs().max() == 0
    step, state = read_old_training_state(tmp_path / "model_1000.pth")
    assert step == 1001
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=9.0)
    other_optimizer.load_state_dict(state)
    for name, ours in ((p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True)):
        assert torch.equal(other_optimizer.state[name]["exp_avg"], optimizer.state[ours]["exp_avg"])


def test_numpy_1_module_name_is_read(tmp_path):
    """Files written under numpy 1 name numpy.core, those under numpy 2 numpy._core."""
    torch.save({"model_state_dict": {"w": torch.zeros(1)}, "metrics": {"loss": np.float64(1.5)}}, tmp_path / "new.pth")
    old = tmp_path / "old.pth"
    torch.save(
        {"model_state_dict": {"w": torch.zeros(1)}, "metrics": {"loss": np.float64(1.5)}},
        old,
        _use_new_zipfile_serialization=False,
    )
    content = old.read_bytes()
    assert b"numpy._core.multiarray" in content
    old.write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert read_pickle(old)["metrics"] == read_pickle(tmp_path / "new.pth")["metrics"] == {"loss": 1.5}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_nanot5_weights_load(tmp_path, prefix):
    """nanoT5 saves its model's flat state dict through Accelerate, as pytorch_model.bin in a directory."""
    model, other = random_t5(0, tied=False), random_t5(1, tied=False)
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        load_weights(other, source)
        assert torch.equal(logits(other), logits(model))
        assert read_old_training_state(source) == (0, None)


def half_of_a_file(zipped):
    torch.save({"w": torch.zeros(1000)}, file := io.BytesIO(), _use_new_zipfile_serialization=zipped)
    return file.getvalue()[: file.tell() // 2]


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x80\x02garbage", b"PK\x03\x04" + b"\0" * 40, half_of_a_file(True), half_of_a_file(False)],
    ids=["empty", "text", "a pickle's beginning", "a zip's beginning", "half a zip", "half a pickle"],
)
def test_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(UserError, match=r"m\.pth cannot be read \(.*truncated") as error:
        load_weights(torch.nn.Linear(1, 1), tmp_path / "m.pth")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [[1, 2], {}, {"optimizer": {}}, {"model_state_dict": {"a": 1}}, torch.zeros(2)])
def test_file_without_weights_is_told(tmp_path, content):
    torch.save(content, tmp_path / "m.pth")
    with pytest.raises(UserError, match="no model weights"):
        load_weights(random_t5(1), tmp_path / "m.pth")


def test_what_is_written_as_the_ancestor_did_is_read_back(tmp_path):
    model = random_t5()
    optimizer = write_ancestor(tmp_path / "model_1000.pth", model)
    weights, metrics = dict(model.state_dict()), {"valid": {"loss": 2.0}}
    write_old_checkpoint(tmp_path / "model_best.pth", weights, optimizer.state_dict(), 1001, 3, metrics)
    theirs, ours = (read_old_training_state(tmp_path / f"model_{name}.pth") for name in ("1000", "best"))
    content = torch.load(tmp_path / "model_best.pth")
    assert (content["iteration"], content["epoch"], content["metrics"]) == (1000, 3, metrics)
    for number, state in theirs[1]["state"].items():
        assert torch.equal(state["exp_avg"], ours[1]["state"][number]["exp_avg"])
    assert {path.name for path in tmp_path.iterdir()} == {"model_1000.pth", "model_best.pth"}


def test_a_folder_of_its_accelerate_trainer_says_where_it_stopped(tmp_path):
    optimizer = write_ancestor(tmp_path / "model.pth", random_t5())
    torch.save({"iteration": 99, "epoch": 2, "metrics": {"loss": np.mean([1.0])}}, tmp_path / "trainer.pckl")
    assert read_old_training_state(tmp_path) == (100, None)
    (tmp_path / "accelerate_state").mkdir()
    torch.save(optimizer.state_dict(), tmp_path / "accelerate_state" / "optimizer.bin")
    step, state = read_old_training_state(tmp_path)
    assert step == 100 and state["param_groups"][0]["lr"] == 1e-3


def test_an_optimizer_state_with_the_same_groups_goes_into_them():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)  # and yet given to the optimizer, as programs do
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(model, (1e-3, 1e-2), strict=True)]
    for made in (groups, [{"params": list(model.parameters())}]):
        optimizer = torch.optim.AdamW(made, lr=1e-3)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert regrouped(state, model, optimizer)["state"] is state["state"]
    with pytest.raises(UserError, match="has 4 parameters in 1 group"):
        regrouped(state, model, torch.optim.AdamW(groups, lr=1e-3))
