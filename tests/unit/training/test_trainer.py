"""The loop on one process, against plain PyTorch written out by hand and against an uninterrupted run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.utils.data import DataLoader

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.optimizers import build_optimizer
from tests.helpers import loops
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller, gradients_at_steps, tiny_t5, weights_of


def make_loop(args=None, *, model=None, **options):
    settings = {"iters": 5, "log_interval": 2, **(args or {})}
    return loops.make_loop(model or tiny_t5(), **settings, **options)


class Recorder:
    """Notes at every step what `look` gives."""

    every = 1

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_end(self, loop, info):
        self.seen.append(self.look(loop, info))


def by_hand(indices, data, model):
    """Gradient of the sum of token losses over the number of tokens, one pass over all rows."""
    batch = data.batch(indices)
    logits = model(**batch).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@pytest.mark.parametrize("batch_size, accumulation", [(8, 1), (3, 3), (1, 8)])
def test_any_split_into_micro_batches_has_the_gradient_of_one_big_batch(batch_size, accumulation):
    data = RaggedPairs(8)
    expected = tiny_t5()
    loss = by_hand(range(8), data, expected)
    loss.backward()
    model = tiny_t5()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    captured = gradients_at_steps(model, optimizer)
    args = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "iters": 1, "log_interval": 1}
    loader = DataLoader(data, batch_size=8)
    loop = make_loop(args, model=model, optimizer=optimizer, loader=loader)
    loop.train()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(captured[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
    assert loop.state.metrics["train"]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_resumed_is_uninterrupted_bit_for_bit_at_every_step(tmp_path):
    """Dropout, accumulation, two epochs of 12 rows, 4 rows a step; each step but the last is one to resume from."""

    def run(iters, path, **args):
        torch.manual_seed(7)
        model = tiny_t5(dropout=0.3)
        norms = Recorder(lambda loop, info: (info.step, info.grad_norm))
        settings = {"batch_size": 2, "gradient_accumulation_steps": 2, "iters": iters, "model_path": str(path), **args}
        loop = make_loop(settings, model=model, loader=SeekableBatches(RaggedPairs(12), 4), callbacks=[norms])
        loop.train()
        return weights_of(model), norms.seen, loop.state.consumed_samples

    whole, whole_norms, samples = run(6, tmp_path / "whole")
    run(5, tmp_path / "parts", save_interval=1, keep_checkpoints=None)
    for stop in range(1, 6):
        checkpoint = str(tmp_path / "parts" / "checkpoints" / f"step_{stop:06d}")
        resumed, norms, consumed = run(6, tmp_path / f"from_{stop}", resume=checkpoint)
        assert norms == whole_norms[stop:] and norms[0][0] == stop + 1 and consumed == samples
        assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def poison(model, when):
    """Make the gradient non-finite in the steps (counted from 1) of `when`."""
    calls = {"n": 0}

    def hook(gradient):
        calls["n"] += 1
        return gradient * math.nan if calls["n"] in when else gradient

    model.decoder.final_layer_norm.weight.register_hook(hook)


def test_a_non_finite_gradient_skips_the_update_and_is_counted(tmp_path, caplog):
    model = tiny_t5()
    poison(model, {2})
    before_after = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = make_loop({"iters": 3, "model_path": str(tmp_path)}, model=model, optimizer=optimizer)
    step = loop.train_step

    def watched(batch, seconds):
        before = weights_of(model)
        info = step(batch, seconds)
        before_after.append((info.applied, all(torch.equal(before[n], w) for n, w in weights_of(model).items())))
        return info

    loop.train_step = watched
    loop.train()
    assert before_after == [(True, False), (False, True), (True, False), (True, False)]  # 4 attempts, 3 updates
    assert loop.state.step == 3 and loop.state.skipped_updates == 1
    assert loop.state.consumed_samples == 16
    assert "gradient norm nan after step 1: update skipped" in caplog.text
    assert all(torch.isfinite(w).all() for w in model.state_dict().values())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["skipped_updates"] == 1
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)


def test_early_stopping_waits_for_patience_and_keeps_the_best(tmp_path):
    data = RaggedPairs(8)
    model = tiny_t5()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)  # too large: validation gets worse after a while
    args = {
        "iters": 40, "model_path": str(tmp_path), "valid_interval": 1, "early_stopping_patience": 3, "save_best": True,
    }  # fmt: skip
    loop = make_loop(args, model=model, optimizer=optimizer, valid=DataLoader(data, batch_size=4))
    values = []
    validate = loop.validate
    loop.validate = lambda *a, **k: values.append(validate(*a, **k)) or values[-1]
    loop.train()
    losses = [v["loss"] for v in values]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert loop.state.step == len(losses) == best + 1 + 3 < 40
    assert loop.state.best_step == best + 1 and loop.state.best_metric == losses[best]
    assert (tmp_path / "best").resolve().name == f"step_{best + 1:06d}"
    loop.load(tmp_path / "best")
    assert validate(loop.valid_dataloader)["loss"] == losses[best]


def test_a_metric_that_validation_does_not_give_is_named_and_no_update_is_lost(tmp_path):
    loop = make_loop(
        {"model_path": str(tmp_path), "optimize_metric": "rougeL", "valid_interval": 1},
        valid=DataLoader(RaggedPairs(4), batch_size=4),
    )
    with pytest.raises(UserError, match="rougeL is no number of validation, which gives loss"):
        loop.train()
    assert (tmp_path / "last").resolve().name == "step_000001"


def test_an_empty_dataset_is_an_error_at_once():
    with pytest.raises(UserError, match="no batch in epoch 0"):
        make_loop(loader=DataLoader(RaggedPairs(0), batch_size=4)).train()


def test_fp16_overflow_is_skipped_and_the_loss_scale_recovers():
    from lm_experiments_tools.backends.precision import LossScaledFp16

    backend = LocalBackend(LossScaledFp16(max_scale=2.0**24))
    loop = loops.make_loop(tiny_t5(), backend=backend, lr=1e-3, fp16=True)
    scaler = backend.precision.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**24})  # far too large for fp16
    loop.train()
    assert loop.state.step == 3 and loop.state.skipped_updates > 0
    assert backend.precision.scaler.get_scale() < 2.0**24
    assert math.isfinite(loop.state.metrics["train"]["loss"])


def test_an_ancestors_checkpoint_goes_on_with_its_optimizer_state(tmp_path):
    """t5-experiments: one parameter group over model.parameters(); ours: matrices apart from the rest."""
    model = tiny_t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    make_loop({"iters": 3}, model=model, optimizer=optimizer).train()
    old = {
        "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "iteration": 2,
        "epoch": 0,
    }  # fmt: skip
    torch.save(old, tmp_path / "model_2.pth")
    new = tiny_t5(seed=5)
    grouped = build_optimizer(new, name="AdamW", lr=1e-2, weight_decay=0.0)
    args = {"iters": 4, "init_checkpoint": str(tmp_path / "model_2.pth")}
    loop = make_loop(args, model=new, optimizer=grouped)
    assert loop.state.step == 3 and len(grouped.param_groups) == 2
    for ours, theirs in zip(new.parameters(), model.parameters(), strict=True):
        assert torch.equal(grouped.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        assert torch.equal(ours, theirs)
    loop.train()


def test_another_optimizers_state_is_refused(tmp_path):
    make_loop({"iters": 2, "model_path": str(tmp_path)}).train()
    model = tiny_t5()
    args = {"init_checkpoint": str(tmp_path / "last")}
    with pytest.raises(UserError, match="AdamW, which SGD cannot continue"):
        make_loop(args, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_finished_run_started_again_logs_nothing_twice(tmp_path):
    """10 steps, logged every 3, validated every 4, saved every 5: the last save comes before the last log."""
    valid = DataLoader(RaggedPairs(4), batch_size=4)
    args = {"iters": 10, "log_interval": 3, "valid_interval": 4, "save_interval": 5, "model_path": str(tmp_path)}
    make_loop(args, model=TinyLabeller(), valid=valid).train()
    first = (tmp_path / "metrics.jsonl").read_text()
    again = make_loop(args, model=TinyLabeller(), valid=valid)
    assert again.state.last_validated_step == 10
    again.train()
    assert (tmp_path / "metrics.jsonl").read_text() == first


def test_parameters_that_a_callback_unfreezes_are_refused():
    model = TinyLabeller()
    model.embedding.requires_grad_(False)
    unfreeze = loops.At(2, lambda loop: model.embedding.requires_grad_(True))
    loop = loops.make_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), iters=4, callbacks=[unfreeze])
    with pytest.raises(UserError, match="frozen or unfrozen after the trainer was made"):
        loop.train()


def test_the_whole_model_trains_in_training_mode_and_validates_in_evaluation_mode():
    model, modes = tiny_t5().eval(), []
    for module in (model, model.encoder, model.decoder):
        module.register_forward_pre_hook(lambda module, _: modes.append((torch.is_grad_enabled(), module.training)))
    valid = DataLoader(RaggedPairs(4), batch_size=4)
    loop = make_loop({"iters": 6, "valid_interval": 2, "valid_at_start": True}, model=model, valid=valid)
    loop.train()
    assert modes.count((True, True)) == 6 * 3
    assert modes.count((False, False)) == (1 + 6 // 2) * 3
    assert len(modes) == (6 + 4) * 3


def test_init_checkpoint_takes_what_the_reset_flags_leave(tmp_path):
    make_loop({"iters": 4, "model_path": str(tmp_path / "first")}).train()
    source = str(tmp_path / "first" / "last")

    def start(**args):
        return make_loop({"iters": 6, "init_checkpoint": source, "model_path": str(tmp_path / "second"), **args})

    loop = start()
    assert loop.state.step == 4 and loop.state.consumed_samples == 0 and loop.backend.optimizer.state
    loop = start(reset_optimizer=True, reset_iteration=True)
    assert loop.state.step == 0 and not loop.backend.optimizer.state
    loop = start(skip_used_data=True)
    assert loop.state.consumed_samples == 16 and loop.stream.loader.consumed == 16
    loop = start(reset_lr=True, lr_scheduler="linear", num_warmup_steps=0)
    loop.learning_rate.set(loop.backend.optimizer, loop.state.step - loop.state.schedule_start)
    assert loop.state.schedule_start == 4 and loop.backend.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)
