"""`--init_checkpoint`: what a new run takes over from another one's checkpoint, ours or not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.data import DataLoader

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.schedules import get_schedule
from tests.helpers import loops
from tests.helpers.toys import RaggedPairs, tiny_t5, weights_of


def make_loop(model=None, **args):
    def metrics(batch, outputs):
        return {"loss": outputs["loss"], "flat": 1.0}

    valid = DataLoader(RaggedPairs(4), batch_size=4)
    return loops.make_loop(model, valid=valid, batch_metrics_fn=metrics, **{"iters": 4, **args})


def rate(loop):
    loop.learning_rate.set(loop.backend.optimizer, loop.state.step - loop.state.schedule_start)
    return loop.backend.optimizer.param_groups[0]["lr"]


def test_the_weights_of_a_hugging_face_trainers_checkpoint_are_taken(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs = tiny_t5(seed=3)
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    transformers.Trainer(theirs, settings, train_dataset=RaggedPairs(8)).train()
    checkpoint = tmp_path / "checkpoint-1"
    assert (checkpoint / "trainer_state.json").is_file()
    loop = make_loop(tiny_t5(), init_checkpoint=str(checkpoint))
    assert all(
        torch.equal(value, weights_of(loop.backend.unwrap())[name]) for name, value in weights_of(theirs).items()
    )
    assert loop.state.step == 0
    loop.train()


DROPS = {"use_lr_drop": True, "lr_drop_patience": 0, "lr_drop_factor": 0.5, "optimize_metric": "flat"}


@pytest.mark.parametrize("flags, expected", [({}, 3e-3 / 8), ({"reset_lr": True}, 3e-3)])
def test_drops_of_the_learning_rate_go_on_from_this_runs_own(tmp_path, flags, expected):
    first = make_loop(model_path=str(tmp_path), **DROPS)
    first.train()
    assert first.learning_rate.plateau.multiplier == 1 / 8
    loop = make_loop(init_checkpoint=str(tmp_path / "last"), lr=3e-3, iters=6, **DROPS, **flags)
    assert rate(loop) == pytest.approx(expected, rel=1e-12)


def test_counting_from_0_does_not_start_the_schedule_again(tmp_path):
    schedule = {"lr_scheduler": "linear", "num_warmup_steps": 3, "num_training_steps": 20}
    make_loop(model_path=str(tmp_path), **schedule).train()
    multiplier = get_schedule("linear", num_warmup_steps=3, num_training_steps=20)

    def start(**flags):
        return make_loop(init_checkpoint=str(tmp_path / "last"), iters=6, **schedule, **flags)

    assert rate(start()) == rate(start(reset_iteration=True)) == 1e-2 * multiplier(4)
    assert rate(start(reset_iteration=True, reset_lr=True)) == rate(start(reset_lr=True)) == 1e-2 * multiplier(0)
    loop = start(reset_iteration=True, model_path=str(tmp_path / "second"))
    loop.train()
    assert loop.state.step == 6 and rate(loop) == 1e-2 * multiplier(10)
    resumed = make_loop(model_path=str(tmp_path / "second"), iters=8, **schedule)
    assert rate(resumed) == 1e-2 * multiplier(10)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "optimizer.json", "trainer_state.json"])
def test_damaged_state_is_not_started_from(tmp_path, name):
    make_loop(model_path=str(tmp_path)).train()
    file = (tmp_path / "last" / name).resolve()
    content = bytearray(file.read_bytes())
    at = len(content) - 2 if name.endswith("safetensors") else content.rindex(b"0")
    content[at] = content[at] ^ 0x01
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{name} does not match"):
        make_loop(init_checkpoint=str(tmp_path / "last"), iters=6)
    if name.startswith("optimizer"):
        make_loop(init_checkpoint=str(tmp_path / "last"), iters=6, reset_optimizer=True)


def test_the_state_of_one_parameter_is_not_taken_for_that_of_another(tmp_path):
    """As many of the same shapes, in the same order."""

    def frozen(letter):
        model = tiny_t5()
        model.get_parameter(f"encoder.block.0.layer.0.SelfAttention.{letter}.weight").requires_grad_(False)
        return model

    make_loop(frozen("k"), model_path=str(tmp_path)).train()
    for start in ({"model_path": str(tmp_path)}, {"init_checkpoint": str(tmp_path / "last")}):
        with pytest.raises(UserError, match=r"its parameter 1 is .*\.q\.w.*, and that of this run is .*\.k\.w"):
            make_loop(frozen("q"), iters=6, **start)
    make_loop(frozen("q"), iters=6, reset_optimizer=True, init_checkpoint=str(tmp_path / "last"))
    make_loop(frozen("k"), iters=6, model_path=str(tmp_path)).train()


def test_the_state_is_taken_by_a_model_that_recomputes_activations_and_back(tmp_path):
    def recomputing():
        model = tiny_t5()
        apply_activation_checkpointing(model, check_fn=lambda module: module in [*model.encoder.block])
        return model

    make_loop(recomputing(), model_path=str(tmp_path)).train()
    make_loop(tiny_t5(), model_path=str(tmp_path), iters=6).train()
    assert make_loop(recomputing(), model_path=str(tmp_path), iters=8).state.step == 6
