"""Schedules against the schedulers they are named after, value by value."""

import json
import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.schedules import PlateauDrop, get_schedule

BASE_LR = 0.0173


def optimizer(lr=BASE_LR):
    return torch.optim.SGD([torch.zeros(1)], lr=lr)


def rates(opt, scheduler, steps):
    """The learning rate used by update k, for k in 0..steps."""
    seen = []
    for _ in range(steps + 1):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return seen


CASES = [
    ("constant", {}, {}),
    ("constant_with_warmup", {}, {}),
    ("linear", {}, {}),
    ("cosine", {}, {}),
    ("cosine", {"num_cycles": 1.25}, None),
    ("cosine_with_restarts", {}, {}),
    ("cosine_with_restarts", {"num_cycles": 3}, None),
    ("polynomial", {}, {}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-4}, None),
    ("inverse_sqrt", {}, {}),
    ("inverse_sqrt", {"timescale": 50}, None),
    ("cosine_with_min_lr", {"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"warmup_lr_rate": 0.2}, {"min_lr_rate": 0.0, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {}, {"num_decay_steps": 21}),
    ("warmup_stable_decay", {"num_decay_steps": 60, "min_lr_ratio": 0.05}, None),
    ("warmup_stable_decay", {"num_decay_steps": 60, "decay_type": "1-sqrt", "warmup_type": "cosine"}, None),
    ("warmup_stable_decay", {"num_decay_steps": 50, "decay_type": "linear", "warmup_type": "1-sqrt"}, None),
    ("warmup_stable_decay", {"num_decay_steps": 50, "num_stable_steps": 20}, None),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warmup", [0, 1, 30])
@pytest.mark.parametrize(("name", "ours", "theirs"), CASES)
def test_schedule_equals_transformers_exactly(name, ours, theirs, warmup):
    """Up to the end (210 updates); the rate of the end is that of all updates after it."""
    from transformers.optimization import get_scheduler

    opt = optimizer()
    theirs = ours if theirs is None else theirs
    reference = get_scheduler(name, opt, warmup, 210, scheduler_specific_kwargs=dict(theirs))
    takes_warmup = name != "constant" and (warmup or "warmup" in name)  # 0 is the default of the others
    given = {"num_warmup_steps": warmup} if takes_warmup else {}
    schedule = get_schedule(name, **given, num_training_steps=210, base_lr=BASE_LR, **ours)
    expected = rates(opt, reference, 240)
    if name not in ("constant_with_warmup", "inverse_sqrt"):  # which have no end
        expected[210:] = [expected[210]] * 31
    assert [BASE_LR * schedule(k) for k in range(241)] == expected
    assert name.startswith("constant") or min(expected) < max(expected)


def test_every_pure_schedule_of_transformers_has_its_namesake():
    from transformers.trainer_utils import SchedulerType

    depends_on_metrics = {"reduce_lr_on_plateau", "greedy"}
    assert {kind.value for kind in SchedulerType} - depends_on_metrics <= set(known_schedules())


def known_schedules():
    with pytest.raises(UserError) as refused:
        get_schedule("nothing_like_it")
    return str(refused.value).partition("Known: ")[2].partition(";")[0].split(", ")


@pytest.mark.filterwarnings("ignore")
def test_cosine_with_floor_equals_nanot5():
    """nanoT5 composes LinearLR(0.5 -> 1) and CosineAnnealingLR(eta_min=final_cosine) in a SequentialLR."""
    warmup, total, base_lr, final = 40, 200, 2e-2, 1e-5
    opt = optimizer(base_lr)
    first = LinearLR(opt, start_factor=0.5, end_factor=1, total_iters=warmup)
    second = CosineAnnealingLR(opt, T_max=total - warmup, eta_min=final)
    expected = rates(opt, SequentialLR(opt, [first, second], milestones=[warmup]), total)
    schedule = get_schedule(
        "cosine_with_floor", num_warmup_steps=warmup, num_training_steps=total, min_lr_ratio=final / base_lr
    )
    assert [base_lr * schedule(k) for k in range(total + 1)] == pytest.approx(expected, rel=1e-9)
    assert base_lr * schedule(10 * total) == pytest.approx(final)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("total", [200, 2003])
def test_legacy_equals_nanot5(total):
    """nanoT5 composes a LambdaLR and a LinearLR; both starts are divided by base_lr."""
    base_lr = 2e-2
    turn = math.ceil(total * 0.9)
    opt = optimizer(base_lr)
    first = LambdaLR(opt, lambda k: (min(1e-2, 1.0 / math.sqrt(k)) if k else 1e-2) / base_lr)
    start = min(1e-2, 1.0 / math.sqrt(turn)) / base_lr
    second = LinearLR(opt, start_factor=start, end_factor=0, total_iters=total - turn)
    expected = rates(opt, SequentialLR(opt, [first, second], milestones=[turn]), total)
    schedule = get_schedule("legacy", num_training_steps=total, base_lr=base_lr)
    assert [base_lr * schedule(k) for k in range(total + 1)] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert get_schedule("legacy", num_training_steps=total, base_lr=0.3)(0) * 0.3 == pytest.approx(1e-2)


def test_t5_inverse_sqrt_is_the_papers():
    paper = get_schedule("t5_inverse_sqrt")  # k = 10^4
    assert paper(0) == paper(10_000) == 0.01
    assert paper(40_000) == 0.005
    assert get_schedule("t5_inverse_sqrt", num_warmup_steps=100)(400) == 0.05


def halves(step, num_warmup_steps, num_training_steps, factor=0.5):
    return factor ** (step / num_training_steps)


def needs_power(step, power, num_warmup_steps, num_training_steps):
    return step**power


def test_a_users_function_is_a_schedule():
    numbers = {"num_training_steps": 100, "base_lr": BASE_LR}
    multiplier = get_schedule(f"{__name__}:halves", **numbers)
    assert [multiplier(step) for step in (0, 50, 100, 200)] == [1.0, 0.5**0.5, 0.5, 0.5]
    assert get_schedule(f"{__name__}:halves", **numbers, factor=0.25)(50) == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reduce_lr_on_plateau", {}, "--use_lr_drop"),
        ("constant_with_warmup", {"num_training_steps": 10}, "needs --num_warmup_steps"),
        ("linear", {"num_warmup_steps": 1}, "needs --num_training_steps"),
        ("linear", {"num_warmup_steps": 11, "num_training_steps": 10}, "11 is more than the 10"),
        ("constant", {"num_warmup_steps": 5}, "no effect with --lr_scheduler constant"),
        ("polynomial", {"num_warmup_steps": 0, "num_training_steps": 9, "base_lr": 1e-8}, "lr_end .* must be smaller"),
        (f"{__name__}:halves", {}, "needs --num_training_steps"),
        (f"{__name__}:needs_power", {"num_training_steps": 9}, "missing 1 required positional argument: 'power'"),
    ],
)
def test_senseless_schedule_is_one_sentence(name, options, message):
    with pytest.raises(UserError, match=message) as refused:
        get_schedule(name, **options)
    assert ":" not in name or f"--lr_scheduler {name}" in str(refused.value)


SETTINGS = [
    {"patience": 1, "factor": 0.5},
    {"patience": 0, "factor": 0.3, "cooldown": 2, "threshold": 0.05, "threshold_mode": "abs"},
    {"patience": 2, "factor": 0.1, "mode": "max", "min_lr": 3e-4},
    {"patience": 0, "factor": 0.9, "eps": 1e-3},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_plateau_drop_equals_torch_and_resumes_from_json(settings):
    generator = torch.Generator().manual_seed(0)
    metrics = (1.0 + torch.rand(60, generator=generator) / (1 + torch.arange(60) * 0.05)).tolist()
    opt = optimizer()
    reference = ReduceLROnPlateau(opt, **settings)
    ours = PlateauDrop(BASE_LR, **settings)
    assert ours.multiplier == 1.0 and json.loads(json.dumps(ours.state_dict(), allow_nan=False))["best"] is None
    for metric in metrics:
        reference.step(metric)
        ours.update(metric)
        assert BASE_LR * ours.multiplier == pytest.approx(opt.param_groups[0]["lr"], rel=1e-12)
        resumed = PlateauDrop(BASE_LR, **settings)
        resumed.load_state_dict(json.loads(json.dumps(ours.state_dict(), allow_nan=False)))
        assert resumed.multiplier == ours.multiplier
        ours = resumed
    assert ours.multiplier < 1


def test_a_first_group_that_is_not_trained_leaves_the_schedule_of_the_others():
    assert get_schedule("linear", num_warmup_steps=2, num_training_steps=10, base_lr=0.0)(1) == 0.5


def test_a_warm_up_may_take_the_whole_run():
    schedule = get_schedule("linear", num_warmup_steps=10, num_training_steps=10)
    assert [schedule(step) for step in (0, 5, 9)] == [0.0, 0.5, 0.9]
