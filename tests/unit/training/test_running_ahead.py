"""A device with a queue never waits for the host: it is asked one step later what became of an update."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lm_experiments_tools.backends.backend import Backend, LocalBackend
from lm_experiments_tools.backends.precision import LossScaledFp16
from lm_experiments_tools.optimizers import (
    Adafactor,
    AdamWScale,
    StableAdamW,
    adafactor,
    adamw_scale,
    stable_adamw,
    state,
)
from lm_experiments_tools.optimizers.muon import Muon
from lm_experiments_tools.training.micro_batches import to_device
from lm_experiments_tools.training.trainer import TrainingDiverged, TrainingLoop
from modeling_t5 import T5Config, T5ForConditionalGeneration
from tests.helpers import loops
from tests.helpers.toys import RaggedPairs, SeekableBatches, TinyLabeller, tiny_t5, weights_of

OURS = {
    "adamw_scale": lambda model, **options: AdamWScale(model.parameters(), lr=1e-2, weight_decay=0.1, **options),
    "stable_adamw": lambda model: StableAdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "adafactor": lambda model: Adafactor(
        model.parameters(), lr=1e-2, relative_step=False, weight_decay=0.1, beta1=0.9
    ),
    "adafactor_relative": lambda model: Adafactor(model.parameters(), warmup_init=True),
    "muon": lambda model: muon_of(model, "AdamWScale"),
    "muon_adamw": lambda model: muon_of(model, "AdamW"),
}


def muon_of(model: nn.Module, others: str) -> Muon:
    hidden = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return Muon([{"params": hidden, "is_hidden": True}, {"params": rest}], lr=1e-2, weight_decay=0.1, others=others)


@pytest.fixture
def queued(monkeypatch):
    """Our optimizers take the CPU for a device with a queue."""
    for module in (adafactor, adamw_scale, stable_adamw, state):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


QUEUE = torch.device("cpu", 0)  # stands for a device


class AheadBackend(LocalBackend):
    """A CPU that is treated as a device with a queue."""

    def __init__(self) -> None:
        super().__init__(device=QUEUE)
        self._runs_ahead = True


def make_loop(args: dict, model: nn.Module, *, backend: Backend | None = None, optimizer: Any = None, **options: Any):
    args = {"batch_size": 2, "gradient_accumulation_steps": 2, "clip_grad_norm": 0.5, **args}
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return loops.make_loop(model, optimizer, backend=backend or AheadBackend(), **args, **options)


@contextmanager
def around_steps(loop: TrainingLoop, first: int, last: int, before: Callable, after: Callable) -> Iterator[None]:
    """Calls `before` ahead of step `first` and of the fetch of its batch, and `after` behind step `last`."""
    step, made = loop.train_step, []

    def counted(*batch: Any) -> Any:
        info = step(*batch)
        made.append(info)
        if len(made) == first - 1:
            before()
        if len(made) == last:
            after()
        return info

    loop.train_step = counted
    yield
    assert len(made) >= last


def own_t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(**tiny_t5().config.to_dict()))


def state_of(optimizer: torch.optim.Optimizer) -> list:
    return [
        leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(optimizer.state_dict()["state"])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_where_found_inf_is_set_our_optimizers_change_nothing_at_all(queued, name, dtype):
    """As a twin that was never given the poisoned gradients; also if the first step of all is skipped."""
    models = [tiny_t5().to(dtype) for _ in range(2)]
    ours, twin = (OURS[name](model) for model in models)
    generator = torch.Generator().manual_seed(5)
    for skip in (True, False, False, True, True, False):
        before, held = state_of(ours), weights_of(models[0])
        gradients = [torch.randn(p.shape, generator=generator).to(dtype) for p in models[0].parameters()]
        for one, other, gradient in zip(models[0].parameters(), models[1].parameters(), gradients, strict=True):
            one.grad, other.grad = gradient * (math.nan if skip else 1), gradient.clone()
        ours.found_inf, twin.found_inf = torch.tensor(float(skip)), torch.tensor(0.0)
        ours.step()
        if skip:
            assert all(torch.equal(weights_of(models[0])[key], tensor) for key, tensor in held.items())
            after = state_of(ours)
            for one, other in zip(after, before or [torch.zeros_like(leaf) for leaf in after], strict=True):
                assert torch.equal(one, other)
        else:
            twin.step()
    assert all(torch.equal(one, other) for one, other in zip(state_of(ours), state_of(twin), strict=True))
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("name", OURS)
def test_on_the_host_found_inf_and_grad_scale_are_obeyed_at_once(name):
    """Gradients scaled by a power of two and divided by it give the bits of a step that knows of no scale."""
    models = [tiny_t5() for _ in range(2)]
    ours, plain = (OURS[name](model) for model in models)
    for number, skip in enumerate((True, False, True, False)):
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            other.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(number))
            one.grad = other.grad * (math.inf if skip else 1024.0)
        ours.found_inf, ours.grad_scale = torch.tensor(float(skip)), torch.tensor(1024.0)
        ours.step()
        if not skip:
            plain.step()
    assert all(torch.equal(one, other) for one, other in zip(state_of(ours), state_of(plain), strict=True))
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", *OURS])
def test_steps_3_to_10_never_wait_for_the_gpu(name):
    model = own_t5()
    options = {"optimizer": OURS[name](model)} if name in OURS else {}
    loop = make_loop({"iters": 12, "log_interval": 12, "bf16": True}, model, backend=LocalBackend(), **options)
    assert loop.backend.device.type == "cuda"
    mode = torch.cuda.set_sync_debug_mode
    try:
        with around_steps(loop, 3, 10, lambda: mode("error"), lambda: mode("default")):
            loop.train()
    finally:
        mode("default")
    assert loop.state.step == 12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool])
def test_a_batch_reaches_the_gpu_as_it_is(dtype):
    for values in (torch.arange(-100, 30, 2).to(dtype), torch.full((2, 0), -100).to(dtype)):
        for is_ids in (False, True):
            there = to_device(values, torch.device("cuda"), is_ids)
            assert there.dtype == dtype and torch.equal(there.cpu(), values)


def poison(model: nn.Module, backend: LocalBackend, when: set[int]) -> None:
    """Makes the gradient of these steps, each of two backward passes, not finite."""
    calls, backward = [], backend.backward

    def counted(loss: Tensor, last: bool) -> None:
        calls.append(1)
        backward(loss, last)

    backend.backward = counted

    def hook(gradient: Tensor) -> Tensor:
        return gradient * math.nan if (len(calls) + 1) // 2 in when else gradient

    next(iter(model.parameters())).register_hook(hook)


SCHEDULE = {"iters": 14, "log_interval": 5, "save_interval": 4, "lr_scheduler": "linear", "num_warmup_steps": 6}


def run(
    tmp_path: Any, ahead: bool, skipped: set[int], *, options: dict | None = None, name: str = "adamw", **args: Any
) -> tuple[TrainingLoop, list[float]]:
    """A run whose gradient is not finite in the steps `skipped`, with the learning rate of each of its attempts."""
    model, rates = tiny_t5(dropout=0.1), []
    backend = AheadBackend() if ahead else LocalBackend()
    poison(model, backend, skipped)
    torch.manual_seed(3)
    fused = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    optimizer = OURS[name](model) if name in OURS else fused
    args = {**SCHEDULE, "model_path": str(tmp_path), **args}
    loop = make_loop(args, model, backend=backend, optimizer=optimizer, **(options or {}))
    set_rate = loop.learning_rate.set
    loop.learning_rate.set = lambda *step: set_rate(*step) or rates.append(optimizer.param_groups[0]["lr"])
    loop.train()
    return loop, rates


def lines(path: Any) -> list[dict]:
    """What was logged, less what is measured by a clock."""
    read = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    clocked = ("seconds", "tokens_per_second", "time", "wait", "memory", "mfu")
    return [{k: v for k, v in line.items() if not any(word in k for word in clocked)} for line in read]


@pytest.mark.parametrize(("skipped", "name"), [({2, 3, 6}, "adamw"), ({14}, "adamw_scale")])
def test_asking_late_gives_the_run_of_asking_at_once(queued, tmp_path, caplog, skipped, name):
    runs, logged = {}, {}
    for ahead in (False, True):
        caplog.clear()
        runs[ahead] = run(tmp_path / str(ahead), ahead, skipped, name=name)
        logged[ahead] = [r.getMessage() for r in caplog.records if "update skipped" in r.getMessage()]
    (once, rates), (late, late_rates) = runs[False], runs[True]
    assert logged[True] == logged[False] and len(logged[True]) == len(skipped)
    assert late.state == once.state and late.state.consumed_samples == (14 + len(skipped)) * 4
    assert lines(tmp_path / "True") == lines(tmp_path / "False")
    assert late_rates == rates and len(rates) == 14 + len(skipped)
    for name, tensor in weights_of(once.backend.model).items():
        assert torch.equal(weights_of(late.backend.model)[name], tensor), name
    both = (tree_leaves(r.backend.state.optimizer_state()) for r in (once, late))
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize(("stop_at", "seeks"), [(3, True), (7, False)])
def test_a_run_that_asks_late_goes_on_bit_for_bit_after_a_signal_and_from_a_checkpoint(tmp_path, stop_at, seeks):
    """The signal comes while the batch after step `stop_at` is fetched, when nobody has asked about that step."""

    def loader() -> Any:
        return SeekableBatches(RaggedPairs(24), 4) if seeks else DataLoader(RaggedPairs(18), 4, shuffle=True)

    whole, _ = run(tmp_path / "whole", True, {2}, options={"loader": loader()}, keep_checkpoints=None)
    calls = []

    def signalled(batch: dict) -> dict:
        calls.append(1)
        if len(calls) == stop_at + 2:  # one was skipped
            signal.raise_signal(signal.SIGTERM)
        return batch

    with pytest.raises(SystemExit, match="143"):
        run(tmp_path / "parts", True, {2}, options={"loader": loader(), "batch_transform_fn": signalled})
    resumed, _ = run(tmp_path / "parts", True, set(), options={"loader": loader()})
    older = str(tmp_path / "whole" / "checkpoints" / "step_000008")
    other, _ = run(tmp_path / "whole", True, set(), options={"loader": loader()}, resume=older)
    for loop in (resumed, other):
        assert loop.state == whole.state
        for name, tensor in weights_of(whole.backend.model).items():
            assert torch.equal(weights_of(loop.backend.model)[name], tensor), name


def test_skips_learned_of_late_end_the_run_too():
    model, backend = TinyLabeller(), AheadBackend()
    poison(model, backend, {2, *range(5, 100)})
    loop = make_loop({"iters": 50, "log_interval": 50, "max_skipped_updates": 3}, model, backend=backend)
    before = []
    loop.backend.optimizer.register_step_post_hook(lambda *_: before.append(weights_of(model)))
    with pytest.raises(TrainingDiverged, match="3 updates in a row"):
        loop.train()
    assert loop.state.step == 3 and loop.state.skipped_updates == 4 and loop.state.consumed_samples == 7 * 4
    assert all(torch.equal(before[3][name], tensor) for name, tensor in weights_of(model).items())


def test_what_cannot_skip_on_the_device_is_waited_for():
    model, batch = TinyLabeller(), RaggedPairs(4).batch([0, 1, 2, 3])
    for optimizer, precision in [
        (torch.optim.AdamW(model.parameters(), foreach=True), None),
        (torch.optim.AdamW(model.parameters(), fused=True), LossScaledFp16()),
    ]:
        backend = AheadBackend()
        backend.precision = precision or backend.precision
        backend.setup(model, optimizer)
        backend.backward(backend.model(batch["input_ids"], batch["labels"])["loss"])
        assert backend.clip_and_step(1.0, wait=False).is_done
    backend = AheadBackend()
    poison(model, backend, {2})
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = make_loop({"iters": 3}, model, backend=backend, optimizer=stepped)
    loop.train()
    assert loop.state.step == 3 and loop.state.skipped_updates == 1
