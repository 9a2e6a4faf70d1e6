"""Restarts: settings that are compared, positions and schedules that are kept."""

from __future__ import annotations

import math
import shutil
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.objectives.mlm import MaskedLM
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.batches import BatchStream
from tests.helpers.loops import At, make_loop
from tests.helpers.toys import RaggedPairs, tiny_t5


def start(path, model=None, optimizer=torch.optim.SGD, valid=None, **flags):
    """A loop as a program of the library makes it, and the first inputs of each row that it has trained on."""
    shuffled = torch.Generator().manual_seed(5)
    data = DataLoader(RaggedPairs(24), flags.get("batch_size", 4), shuffle=True, generator=shuffled)
    valid = DataLoader(RaggedPairs(valid), 4) if valid else None
    seen = []

    def note(batch):
        seen.extend(map(tuple, batch["input_ids"].tolist()))
        return batch

    flags = {"log_interval": 50, "model_path": path, "batch_transform_fn": note, **flags}
    return make_loop(model, optimizer, data, valid, **flags), seen


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"lr": 2e-2}, "optimizer.lr ([0.01] then, [0.02] now)"),
        ({"batch_size": 8}, "global_batch_size (4 then, 8 now)"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm (null then, 1.0 now)"),
    ],
)
def test_a_library_run_with_other_settings_is_refused_and_by_resume_it_is_named(tmp_path, caplog, changed, named):
    start(tmp_path)[0].train()
    with pytest.raises(UserError) as refused:
        start(tmp_path, iters=6, **changed)
    assert named in str(refused.value)
    with caplog.at_level("WARNING"):
        start(tmp_path, iters=6, resume=str(tmp_path / "last"), **changed)[0].train()
    assert named in caplog.text
    start(tmp_path, iters=7, resume=str(tmp_path / "last"), **changed)


def test_an_edited_model_configuration_is_refused_by_name(tmp_path):
    start(tmp_path, tiny_t5())[0].train()
    with pytest.raises(UserError, match=r"model_config.dropout_rate \(0.0 then, 0.4 now\)"):
        start(tmp_path, tiny_t5(dropout=0.4), iters=6)
    model = tiny_t5()
    model.config.layer_norm_epsilon = 0.01
    with pytest.raises(UserError, match=r"model_config.layer_norm_epsilon \(1e-06 then, 0.01 now\)"):
        start(tmp_path, model, iters=6)


@pytest.mark.parametrize(("before", "after"), [(4, 10), (8, 4), (4, 6)])
def test_another_batch_size_of_a_plain_loader_neither_skips_nor_repeats_a_row(tmp_path, before, after):
    whole, expected = start(tmp_path / "whole", batch_size=24, iters=2)
    whole.train()
    first, seen = start(tmp_path / "run", batch_size=before, iters=3)
    first.train()
    steps = 4 + math.ceil((48 - 3 * before) / after)
    more, rest = start(tmp_path / "run", batch_size=after, iters=steps, resume=str(tmp_path / "run" / "last"))
    more.train()
    assert (seen + rest)[:48] == expected


def test_a_best_metric_of_other_validation_data_is_forgotten(tmp_path, caplog):
    loop = start(tmp_path, valid=8, save_best=True)[0]
    loop.train()
    assert loop.state.best_metric is not None
    assert start(tmp_path, valid=8, save_best=True)[0].state.best_metric == loop.state.best_metric
    with caplog.at_level("INFO"):
        other = start(tmp_path, valid=12, save_best=True)[0]
    assert other.state.best_metric is None and "validation data is not that of the checkpoint" in caplog.text


def curve(loop, steps):
    rates = []
    for step in steps:
        loop.learning_rate.set(loop.backend.optimizer, step)
        rates.append(loop.backend.optimizer.param_groups[0]["lr"])
    return rates


def test_more_iters_keep_the_schedule_and_num_training_steps_stretches_it(tmp_path, caplog):
    flags = {"lr_scheduler": "cosine", "num_warmup_steps": 0}
    start(tmp_path, iters=6, **flags)[0].train()
    for path in (tmp_path / "checkpoints").iterdir():
        assert path.name == "step_000006"
    with pytest.raises(UserError, match="--num_training_steps 12"):
        start(tmp_path, iters=12, **flags)
    with caplog.at_level("INFO"):
        stretched = start(tmp_path, iters=12, num_training_steps=12, **flags)[0]
    assert curve(stretched, [6, 8]) == pytest.approx([1e-2 * (1 + math.cos(math.pi * n / 12)) / 2 for n in (6, 8)])
    assert "schedule is 12 updates long, and no longer 6" in caplog.text


def test_updates_after_the_end_of_a_schedule_at_0_are_refused_or_warned_of(tmp_path, caplog):
    """A fresh run, one that counts from 0 after another, and a resumed one; a schedule that ends above 0 is fine."""
    cosine = {"lr_scheduler": "cosine", "num_warmup_steps": 0}
    with caplog.at_level("WARNING"):
        fresh = start(tmp_path / "run", iters=8, num_training_steps=4, save_interval=6, **cosine)[0]
    assert "ends at 0 after 4 updates, so the last 4 updates up to --iters 8" in caplog.text
    assert curve(fresh, [3, 4, 6, 8]) == pytest.approx([1e-2 * (1 + math.cos(math.pi * 3 / 4)) / 2, 0, 0, 0])
    fresh.train()
    source = {"init_checkpoint": str(tmp_path / "run" / "last"), "reset_iteration": True, "iters": 4}
    with pytest.raises(UserError, match=r"after 4 updates at 0.*--num_training_steps 12, or .* --reset_lr"):
        start(None, **source, **cosine)
    assert curve(start(None, reset_lr=True, **source, **cosine)[0], [0])[0] == 1e-2
    assert curve(start(None, **source, **cosine, num_training_steps=12)[0], [8])[0] == pytest.approx(1e-2 / 4)
    with pytest.raises(UserError, match=r"after 4 updates at 0.*--num_training_steps 9"):
        start(tmp_path / "run", iters=9, num_training_steps=4, **cosine)
    floored = {"lr_scheduler": "cosine_with_min_lr", "num_warmup_steps": 0, "lr_min_ratio": 0.1}
    assert curve(start(None, **source, **floored)[0], [8])[0] == pytest.approx(1e-3)


def test_a_run_resumed_from_another_ones_checkpoint_goes_on_from_its_own(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    start(old)[0].train()
    for iters, step in ((6, 3), (9, 6)):  # the same command, started again
        loop = start(new, iters=iters, resume=str(old / "last"))[0]
        assert loop.state.step == step
        loop.train()
    assert start(new, iters=9, resume=str(new / "checkpoints" / "step_000006"))[0].state.step == 6, "its own, by name"


def test_a_requeued_return_to_an_earlier_step_goes_on_from_the_newest(tmp_path):
    """The same command, killed again and again; another checkpoint may still be named, and each one validated."""

    def steps():
        return sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").glob("step_*"))

    flags = {"iters": 8, "save_interval": 2, "keep_checkpoints": None, "valid": 8}
    start(tmp_path, **flags)[0].train()
    back = str(tmp_path / "checkpoints" / "step_000002")
    for begins, killed in ((2, 5), (5, 7)):
        stop = At(killed, lambda loop: setattr(loop.signals, "agreed", signal.SIGTERM))
        loop = start(tmp_path, resume=back, callbacks=[stop], **flags)[0]
        assert loop.state.step == begins
        with pytest.raises(SystemExit):
            loop.train()
    assert steps() == [2, 4, 5, 6, 7] and (tmp_path / "checkpoints" / "superseded-step_000008").is_dir()
    assert start(tmp_path, resume=back, validate_only=True, **flags)[0].state.step == 2
    assert start(tmp_path, resume=str(tmp_path / "checkpoints" / "step_000004"), **flags)[0].state.step == 4
    shutil.rmtree(back)  # as pruning does
    loop = start(tmp_path, resume=back, **flags)[0]
    loop.train()
    assert steps() == [4, 5, 6, 7, 8]


class Tokens:
    """Six hundred tokens, no two alike, as one document."""

    fingerprint, tokens = "tokens", np.arange(100, 700)

    def will_need(self, begins, ends):
        pass


def masked_rows(probability, length=20):
    ids = TokenIds(1000, mask_id=5, special_ids=[0])
    objective = MaskedLM.create(ids, length, model_kind="encoder", mlm_probability=probability)
    return TrainLoader(Dataset(TokenRows(Tokens(), objective, seed=3)), 4, 0, 1)


def test_used_data_is_skipped_under_another_mask_rate_and_refused_for_other_lengths():
    before, after = masked_rows(0.15), masked_rows(0.5)
    state = TrainState(consumed_samples=8, data_fingerprint=before.fingerprint)
    stream = BatchStream(after)
    with pytest.raises(UserError, match="--skip_used_data"):
        BatchStream(masked_rows(0.5, 40)).seek(state, {}, BatchStream(before).order)
    with pytest.raises(UserError):
        stream.seek(state, {})
    stream.seek(state, {}, BatchStream(before).order)
    assert after.consumed_samples == 8
    before.seek(8)
    text, masked = next(iter(before))["input_ids"], next(iter(after))["input_ids"]
    shown = (text != 5) & (masked != 5)
    kept = (text == masked) | ~shown  # a tenth of the masked tokens are random ones
    assert kept.float().mean() > 0.8, "the same rows, masked otherwise"
