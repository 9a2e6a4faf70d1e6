"""A torch profiler trace of some optimizer steps, and a table of where their time went (`--profile`).

CPU operators count with their self time, GPU kernels with their duration. The names of an operator and of the
operators around it decide which line of the table its time is added to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType

from lm_experiments_tools.modules.devices import synchronize
from lm_experiments_tools.training.callbacks import Callback, Every

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.metrics import StepInfo
    from lm_experiments_tools.training.trainer import TrainingLoop

_WARM_UP = 5  # steps that are not typical: memory is allocated, graphs are compiled
LINES = (
    "matmul", "attention", "loss", "optimizer", "data wait", "communication", "copies and casts", "other", "idle",
)  # fmt: skip
STEPS = "profiled steps"
"""The range around all traced steps: its length is their wall time."""
DATA_WAIT, COMMUNICATION = "data wait", "communication"
"""Ranges around the wait for a batch, and around a collective that the profiler cannot see."""

# Ranges and operators that own everything inside them. The first matching line wins, over all enclosing operators.
_OWNERS = (
    ("data wait", r"data wait$|enumerate\(DataLoader\)"),
    (
        "communication",
        r"communication$|c10d::|_?c10d_functional::|(gloo|nccl|mpi|ucc):|nccl\w*Kernel|FSDP::all_gather",
    ),
    ("optimizer", r"Optimizer\.|aten::_foreach_|aten::_fused_(adam|sgd|adagrad)|aten::_amp_"),
    (
        "loss",
        r"_LinearTokenLoss|aten::(cross_entropy_loss|_?log_softmax|nll_loss|mse_loss|binary_cross_entropy)|NllLoss|"
        r"LogSoftmax|(MseLoss|BinaryCrossEntropy)\w*Backward|triton_\w*(nll_loss|log_softmax)",
    ),
    (
        "attention",
        r"_(Gather|Triton)Attention|_Toeplitz|aten::_?(scaled_dot_product|flash_attention|efficient_attention|"
        r"cudnn_attention|fused_sdp)|ScaledDotProduct|.*(flash_(fwd|bwd|attn)|fmha|flex_attention|FlexAttention)",
    ),
    ("matmul", r"aten::linear$|mkldnn::\w*linear|onednn::\w*linear|bitsandbytes::"),
)
# Operators that count for themselves and for the operators they call. The innermost one wins.
_OPERATORS = (
    ("matmul", r"aten::(mm|addmm|mv|addmv|matmul|dot|einsum|_scaled_mm|_int_mm|\w*convolution\w*)$|.*gemm|cutlass"),
    ("attention", r"aten::(bmm|baddbmm|_?softmax|_softmax_backward_data|_safe_softmax)$|triton_\w*softmax"),
    ("copies and casts", r"aten::(to|_to_copy|copy_|clone|contiguous|cat|stack|constant_pad_nd)$|Memcpy|Memset"),
    ("optimizer", r"aten::linalg_vector_norm$"),  # of gradients, where they are clipped
)
# Ranges that only wrap operators; their own time is idle.
_RANGES = r"profiled steps$|DistributedDataParallel|FSDP::|Torch-Compiled Region|TorchDynamo|Pregraph|cuda"
_NODE = "autograd::engine::evaluate_function: "


def time_by_line(events: Iterable[Any]) -> dict[str, float]:
    """Divide the duration of the profiled steps into the lines of the table, in milliseconds.

    The lines are `LINES`; their sum is the duration of the steps. Communication counts only where no computation runs
    at the same time. On a GPU this also holds for the time that the host waits.

    Args:
        events: `torch.profiler.profile.events()`.
    """
    events = list(events)
    steps = next(event for event in events if event.name == STEPS)
    host, device = dict.fromkeys(LINES, 0.0), dict.fromkeys(LINES, 0.0)
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        for kernel in event.kernels:
            device[_line_of(kernel.name, event)] += kernel.duration / 1000
        if event.is_async:
            if _line_of(event.name, None) == COMMUNICATION:
                device[COMMUNICATION] += event.time_range.elapsed_us() / 1000
        elif event.thread == steps.thread and _is_within(event, steps):
            host[_line_of(event.name, event.cpu_parent)] += event.self_cpu_time_total / 1000
    on_gpu = any(ms for line, ms in device.items() if line != COMMUNICATION)
    computing = device if on_gpu else host
    waits = {COMMUNICATION: host[COMMUNICATION] + device[COMMUNICATION], DATA_WAIT: host[DATA_WAIT]}
    times = {line: ms for line, ms in computing.items() if line not in (*waits, "idle")}
    left = steps.time_range.elapsed_us() / 1000 - sum(times.values())
    for line, ms in waits.items():
        times[line] = min(ms, max(left, 0.0))
        left -= times[line]
    return {**times, "idle": max(left, 0.0)}


def _is_within(event: Any, steps: Any) -> bool:
    return steps.time_range.start <= event.time_range.start and event.time_range.end <= steps.time_range.end


def _line_of(name: str, parent: Any) -> str:
    """Line of an operator or kernel inside `parent`, an operator or None."""
    names = [name.removeprefix(_NODE)]
    while parent is not None:
        names.append(parent.name.removeprefix(_NODE))
        parent = parent.cpu_parent
    for line, pattern in _OWNERS:
        if any(re.match(pattern, outer) for outer in names):
            return line
    for outer in names:
        for line, pattern in _OPERATORS:
            if re.match(pattern, outer):
                return line
    return "idle" if re.match(_RANGES, names[0]) else "other"


def table(times: Mapping[str, float], num_steps: int, heading: str) -> str:
    """Format the profile as a table: milliseconds per step and percentage of each line, and their sum.

    Args:
        times: {line: milliseconds over all steps}.
    """
    whole = sum(times.values())
    rows = [(line, times[line]) for line in LINES] + [("a step", whole)]
    lines = [f"  {name:<16} {ms / num_steps:12.2f} ms {100 * ms / max(whole, 1e-9):6.1f} %" for name, ms in rows]
    return "\n".join([heading, *lines])


class ProfileCallback:
    """Callback that traces `num_steps` steps after step `start` with torch's profiler, and prints where time went.

    The callback must run last at step `start`, and its `end` callback first, so that no other callbacks are in the
    trace but those between the steps.
    """

    def __init__(self, start: int, num_steps: int, folder: Path) -> None:
        self.start, self.stop, self.folder = start, start + num_steps, folder
        self.every: int | None = start  # then never: a step with a callback waits for the device
        self.end = Every(None, self._end)
        self._profiler, self._range = torch.profiler.profile(), torch.profiler.record_function(STEPS)
        self._before: tuple[int, int] = 0, 0

    def on_step_end(self, trainer: TrainingLoop, info: StepInfo) -> None:
        self.every, self.end.every = None, self.stop
        self._before = self._counts(trainer)
        self._profiler.start()
        synchronize(trainer.backend.device)
        self._range.__enter__()

    def _end(self, trainer: TrainingLoop) -> None:
        self.end.every = None
        synchronize(trainer.backend.device)
        self._range.__exit__(None, None, None)
        self._profiler.stop()
        name, num_steps = f"steps_{self.start + 1}-{self.stop}", self.stop - self.start
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}_rank_{trainer.backend.rank}.json"
        self._profiler.export_chrome_trace(str(trace))
        times = time_by_line(self._profiler.events())
        self._profiler = None
        waits = trainer.backend.gather(times[DATA_WAIT] / num_steps)
        heading = f"where the time of steps {self.start + 1} to {self.stop} went, on rank 0 under the profiler:"
        lines = [table(times, num_steps, heading), *self._remarks(trainer, waits)]
        if trainer.backend.is_main:
            (self.folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        trainer.say("\n".join([*lines, f"profile of steps {self.start + 1} to {self.stop}: {trace}"]))

    @staticmethod
    def _counts(trainer: TrainingLoop) -> tuple[int, int]:
        return trainer.state.skipped_updates, trainer.state.last_validated_step

    def _remarks(self, trainer: TrainingLoop, waits: list[float]) -> list[str]:
        changed = [now != before for now, before in zip(self._counts(trainer), self._before, strict=True)]
        found = []
        if len(waits) > 1:
            ends = (f"{wait:.2f} ms (rank {waits.index(wait)})" for wait in (min(waits), max(waits)))
            found.append(f"  data wait of workers: {' to '.join(ends)} a step")
        found += ["  skipped updates among them are in it"] * changed[0]
        return found + ["  a validation between them is in it: see --profile_after and --valid_interval"] * changed[1]


def with_profile(
    callbacks: list[Callback], args: TrainerArgs, step: int, say: Callable[[str], None]
) -> list[Callback]:
    """Add the callback of `--profile`, if the flag is set, to the callbacks of a training.

    Args:
        step: optimizer steps applied before the training starts.
        say: f(message), which prints the table.
    """
    number = args.profiled_steps()
    if number is None or args.validate_only or step >= args.iters:
        return callbacks
    start = min(step + _WARM_UP, args.iters - number) if args.profile_after is None else args.profile_after
    if start <= step or start + number > args.iters:
        say(
            f"--profile: updates {start + 1} to {start + number} were to be traced, which is left out: "
            f"this start traces from its second one, {step + 2}, to {args.iters}"
        )
        return callbacks
    profile = ProfileCallback(start, number, Path(args.model_path) / "profile")
    return [profile.end, *callbacks, profile]
