"""`--profile`: where the time of a step goes, on events made by hand and on those of real steps."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training import profiling
from lm_experiments_tools.training.profiling import LINES, STEPS, table, time_by_line, with_profile
from tests.helpers.toys import TinyLabeller, tiny_t5
from tests.unit.training.test_trainer import make_loop


def event(name, start, end, thread=0, is_async=False, kernels=()):
    """An event of torch's profiler from `start` to `end` ms, which launched `kernels`, (name, ms) each."""
    span = SimpleNamespace(start=1000 * start, end=1000 * end, elapsed_us=lambda: 1000 * (end - start))
    return SimpleNamespace(
        name=name, time_range=span, thread=thread, is_async=is_async, device_type=DeviceType.CPU, cpu_parent=None,
        self_cpu_time_total=span.elapsed_us(),
        kernels=[SimpleNamespace(name=kernel, duration=1000 * ms) for kernel, ms in kernels],
    )  # fmt: skip


def nonzero(events):
    """Times by line of events that are listed outermost first."""
    for number, inner in enumerate(events):
        around = [
            outer for outer in events[:number]
            if outer.thread == inner.thread and not inner.is_async and not outer.is_async
            and outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end
        ]  # fmt: skip
        if around:
            inner.cpu_parent = around[-1]
            around[-1].self_cpu_time_total -= inner.time_range.elapsed_us()
    return {line: ms for line, ms in time_by_line(events).items() if ms}


def test_each_moment_belongs_to_the_innermost_operator():
    events = [
        event(STEPS, 0, 100),
        event("data wait", 0, 5), event("aten::copy_", 1, 4),
        event("aten::linear", 10, 30), event("aten::matmul", 11, 29), event("aten::bmm", 12, 28),
        event("aten::matmul", 30, 40), event("aten::clone", 30, 32), event("aten::bmm", 33, 40),
        event("_LinearTokenLoss", 40, 50), event("aten::mm", 41, 49),
        event("autograd::engine::evaluate_function: MmBackward0", 50, 60), event("aten::mm", 51, 59),
        event("autograd::engine::evaluate_function: NllLossBackward0", 60, 64), event("aten::fill_", 61, 62),
        event("aten::to", 64, 66), event("aten::gelu", 66, 70),
        event("Optimizer.step#Muon.step", 70, 90), event("aten::mm", 75, 80),
        event("DistributedDataParallel.forward", 90, 98), event("aten::embedding", 92, 93),
        event("aten::mm", 0, 100, thread=7),
    ]  # fmt: skip
    expected = {
        "data wait": 5, "matmul": 20 + 1 + 8, "copies and casts": 2 + 2, "attention": 7, "loss": 10 + 4,
        "optimizer": 20, "other": 2 + 4 + 1, "idle": 5 + 7 + 2,
    }  # fmt: skip
    assert nonzero(events) == expected


def test_compiled_blocks_are_told_by_the_kernels_that_they_call():
    """Names as torch gives them; loops that inductor wrote for a CPU have none of their own."""
    events = [
        event(STEPS, 0, 20), event("Torch-Compiled Region: 0/0", 0, 12), event("CompiledFunction", 1, 11),
        event("## Call CompiledFxGraph f4azy ##", 2, 10), event("aten::addmm", 3, 6), event("aten::bmm", 7, 8),
        event("autograd::engine::evaluate_function: CompiledFunctionBackward", 12, 20),
        event("CompiledFunctionBackward", 12, 20), event("aten::mm", 14, 17),
    ]  # fmt: skip
    assert nonzero(events) == {"matmul": 3 + 3, "attention": 1, "other": 1 + 4 + 1 + 5, "idle": 1 + 1}


def test_communication_counts_as_far_as_no_computation_hides_it():
    def events(mm):
        return [
            event(STEPS, 0, 20), event("aten::mm", 0, mm), event("gloo:all_reduce", 5, 12, is_async=True),
            event("c10d::allreduce_", 19, 20), event("not ours", 15, 18, is_async=True),
        ]  # fmt: skip

    assert nonzero(events(10)) == {"matmul": 10, "communication": 8, "idle": 2}
    assert nonzero(events(15)) == {"matmul": 15, "communication": 5}


def test_a_gpu_is_measured_by_its_kernels():
    """They have the line of the operator that launched them, unless their own name is more telling."""
    events = [
        event(STEPS, 0, 100), event("data wait", 0, 10), event("aten::linear", 10, 12),
        event("aten::addmm", 10, 12, kernels=[("cutlass_80_gemm", 20)]),
        event("autograd::engine::evaluate_function: ScaledDotProductFlashAttentionBackward0", 12, 14, thread=2),
        event("aten::_scaled_dot_product_flash_attention_backward", 12, 14, thread=2, kernels=[("flash_bwd", 10)]),
        event("Optimizer.step#AdamW.step", 14, 16), event("aten::_fused_adamw_", 14, 16, kernels=[("multi_", 10)]),
        event("aten::cross_entropy_loss", 16, 18), event("aten::sum", 16, 18, kernels=[("reduce_kernel", 5)]),
        event("## Call CompiledFxGraph f ##", 18, 20, kernels=[("triton_red_fused__softmax_add_3", 2)]),
        event("c10d::allreduce_", 85, 95, kernels=[("ncclDevKernel_AllReduce", 10)]),
        event("aten::copy_", 96, 97, kernels=[("Memcpy HtoD", 2)]),
    ]  # fmt: skip
    expected = {
        "data wait": 10, "matmul": 20, "attention": 10 + 2, "optimizer": 10, "loss": 5, "copies and casts": 2,
        "communication": 10 + 10, "idle": 21,
    }  # fmt: skip
    assert nonzero(events) == expected


def test_the_table_shows_milliseconds_a_step_and_shares():
    times = {**dict.fromkeys(LINES, 0.0), "matmul": 30.0, "idle": 10.0}
    lines = table(times, 2, "heading").splitlines()
    assert len(lines) == 1 + len(LINES) + 1 and lines[0] == "heading"
    assert lines[1].split() == ["matmul", "15.00", "ms", "75.0", "%"]
    assert lines[-1].split() == ["a", "step", "20.00", "ms", "100.0", "%"]


@pytest.fixture(scope="module")
def traced():
    """(profiler, ms of each line, ms by the clock) of two steps of a T5 with the optimizer's."""
    model = tiny_t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.ones(8, 32, dtype=torch.long), "labels": torch.ones(8, 16, dtype=torch.long)}

    def step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile() as profiler:
        started = time.perf_counter()
        with torch.profiler.record_function(STEPS):
            step()
            step()
        seconds = time.perf_counter() - started
    return profiler, time_by_line(profiler.events()), 1000 * seconds


def test_the_lines_sum_to_the_wall_time(traced):
    profiler, times, by_the_clock = traced
    whole = next(e for e in profiler.events() if e.name == STEPS).time_range.elapsed_us() / 1000
    assert sum(times.values()) == pytest.approx(whole, rel=1e-5)
    assert sum(times.values()) == pytest.approx(by_the_clock, rel=0.05)
    assert all(times[line] > 0 for line in LINES if line not in ("data wait", "communication"))


def test_the_lines_agree_with_the_profilers_own_sums(traced):
    """Self times of `key_averages`, of operators that stand in one line alone here."""
    profiler, times, _ = traced
    own = {row.key: row.self_cpu_time_total / 1000 for row in profiler.key_averages()}
    linear = sum(own.get(f"aten::{name}", 0) for name in ("mm", "addmm", "linear"))
    assert linear < times["matmul"] < linear + sum(own.get(f"aten::{n}", 0) for n in (
        "t", "transpose", "as_strided", "view", "_unsafe_view", "reshape", "resolve_conj", "matmul", "expand",
        "_reshape_alias", "unsqueeze", "empty",
    ))  # fmt: skip
    assert times["attention"] >= sum(own[f"aten::{n}"] for n in ("bmm", "_softmax", "_softmax_backward_data"))
    assert times["idle"] == pytest.approx(own[STEPS], rel=1e-3)
    assert sum(own.values()) == pytest.approx(sum(times.values()), rel=1e-3)


def settings(folder, **rest):
    return {"iters": 8, "log_interval": 2, "model_path": str(folder), **rest}


def test_the_training_is_the_same_bit_for_bit(tmp_path):
    weights = []
    for name, flags in (("plain", {}), ("traced", {"profile": 2, "profile_after": 3})):
        loop = make_loop(settings(tmp_path / name, **flags), model=tiny_t5(dropout=0.1))
        loop.train()
        weights.append(loop.backend.model.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    text = (tmp_path / "traced" / "profile" / "steps_4-5.txt").read_text()
    assert text.startswith("where the time of steps 4 to 5 went") and "matmul" in text
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.parametrize(
    ("flags", "traced"),
    [
        ({"profile": 2}, (6, 7)), ({"profile": 6}, (3, 8)), ({"profile_after": 2}, (3, 5)),
        ({"profile": 1, "profile_after": 7}, (8, 8)),
    ],
)  # fmt: skip
def test_the_steps_that_are_traced(tmp_path, flags, traced):
    make_loop(settings(tmp_path, **flags), model=TinyLabeller()).train()
    first, last = traced
    assert {f.name for f in (tmp_path / "profile").iterdir()} == {
        f"steps_{first}-{last}.txt", f"steps_{first}-{last}_rank_0.json",
    }  # fmt: skip


def test_a_resumed_run_is_traced_after_its_own_start_or_says_that_it_is_not(tmp_path, caplog):
    make_loop(settings(tmp_path, iters=4), model=TinyLabeller()).train()
    with caplog.at_level("INFO"):
        make_loop(settings(tmp_path, profile=3, profile_after=1), model=TinyLabeller()).train()
    assert "updates 2 to 4 were to be traced, which is left out: this start traces from its second one, 6, to 8" in (
        caplog.text
    )
    assert not (tmp_path / "profile").exists()
    make_loop(settings(tmp_path, iters=20, profile=3), model=TinyLabeller()).train()
    assert (tmp_path / "profile" / "steps_14-16.txt").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"profile": 0}, "--profile is 0: it must be at least 1"),
        ({"profile": 8}, "--profile 8, begun after update 1, is not over by --iters 8"),
        ({"profile": 51}, "at most 50"), ({"profile_after": 6}, "--profile 3, begun after update 6"),
        ({"profile": 1, "model_path": ""}, "--profile needs --model_path"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_refused(tmp_path, flags, said):
    with pytest.raises(UserError, match=said):
        args = TrainerArgs(**settings(tmp_path, **flags))
        args.check()
        args.check_used()


def test_waits_of_workers_are_named():
    loop = make_loop({}, model=TinyLabeller())
    profile = with_profile([], dataclasses.replace(loop.args, profile=1, model_path="runs"), 0, loop.say)[-1]
    assert isinstance(profile, profiling.ProfileCallback)
    assert profile._remarks(loop, [2.0, 0.5, 7.25]) == [
        "  data wait of workers: 0.50 ms (rank 1) to 7.25 ms (rank 2) a step"
    ]


@pytest.mark.parametrize("interval", [5, 6])
def test_only_a_validation_between_the_steps_is_in_them(tmp_path, interval):
    valid = [{"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}]
    flags = {"profile": 2, "profile_after": 5, "valid_interval": interval}
    make_loop(settings(tmp_path, **flags), model=TinyLabeller(), valid=valid).train()
    assert ("a validation between them" in (tmp_path / "profile" / "steps_6-7.txt").read_text()) == (interval == 6)
