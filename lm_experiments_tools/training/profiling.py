"""`--profile`: a trace of some steps, and a table of where their time went: torch's events, added up in nine lines.

Each moment of the traced steps belongs to one line, so that the lines sum to the wall time. On a CPU it is that of the
innermost operator which the training thread is in; on a GPU that of the kernel which runs, by the operator that
launched it. The backward pass calls operators of the same names, inside nodes named after those of the forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lm_experiments_tools.training.callbacks import Callback, Every

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.metrics import StepInfo
    from lm_experiments_tools.training.trainer import TrainingLoop

_WARM_UP = 5  # steps that are not typical: memory is allocated, graphs are compiled
LINES = (
    "matmul", "attention", "loss", "optimizer", "data wait", "communication", "copies and casts", "other", "idle",
)  # fmt: skip
_CODES = {line: code for code, line in enumerate(LINES)}
_IDLE = _CODES["idle"]
STEPS = "profiled steps"
"""The range around all traced steps: its length is their wall time."""
DATA_WAIT, COMMUNICATION = "data wait", "communication"
"""Ranges around the wait for a batch, and around a collective that the profiler cannot see."""

# A range or operator that owns all that is done inside it; the first of these lines wins.
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
# An operator that counts for itself and for what it calls: the innermost one wins.
_OPERATORS = (
    ("matmul", r"aten::(mm|addmm|mv|addmv|matmul|dot|einsum|_scaled_mm|_int_mm|\w*convolution\w*)$|.*gemm|cutlass"),
    ("attention", r"aten::(bmm|baddbmm|_?softmax|_softmax_backward_data|_safe_softmax)$|triton_\w*softmax"),
    ("copies and casts", r"aten::(to|_to_copy|copy_|clone|contiguous|cat|stack|constant_pad_nd)$|Memcpy|Memset"),
    ("optimizer", r"aten::linalg_vector_norm$"),  # of gradients, where they are clipped
)
# Ranges in which nothing is computed but by the operators inside.
_RANGES = r"profiled steps$|DistributedDataParallel|FSDP::|Torch-Compiled Region|TorchDynamo|Pregraph|cuda"
_NODE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, slots=True)
class Event:
    """An operator, range or kernel that was recorded.

    Attributes:
        name: of the operator, range or kernel.
        start, end: ns.
        thread: that it was begun in.
        place: "host", "background" (of no thread: gloo's transfers) or "device".
        number: of an operator; a kernel has that of the one that launched it.
    """

    name: str
    start: int
    end: int
    thread: int = 0
    place: str = "host"
    number: int = 0


def events_of(profiler: Any) -> list[Event]:
    """Read what a stopped `torch.profiler.profile` has recorded."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        on_device = event.device_type().name != "CPU"
        if on_device and event.is_user_annotation():  # a range of the host, drawn over its kernels
            continue
        place = "device" if on_device else "background" if event.is_async() else "host"
        number = event.linked_correlation_id() if on_device else event.correlation_id()
        end = event.start_ns() + event.duration_ns()
        found.append(Event(event.name(), event.start_ns(), end, event.start_thread_id(), place, number))
    return found


def time_by_line(events: Iterable[Event]) -> dict[str, float]:
    """Milliseconds of each of `LINES` between the beginning and the end of the range `STEPS`."""
    by_place: dict[str, list[Event]] = {"host": [], "background": [], "device": []}
    for event in events:
        by_place[event.place].append(event)
    steps = next(event for event in by_place["host"] if event.name == STEPS)
    threads: dict[int, list[Event]] = {}
    for event in by_place["host"]:
        threads.setdefault(event.thread, []).append(event)
    host = [Interval(e.start, e.end, label.line()) for e, label in _nested(threads[steps.thread])]
    transfers = [
        Interval(e.start, e.end, line) for e in by_place["background"] if (line := _own_line(e)) == COMMUNICATION
    ]
    kernels = _kernels(by_place["device"], threads.values())
    time = Timeline(steps, [*host, *transfers, *kernels])
    on_host, layers = time.paint(host), [time.paint(_last_first(transfers))]
    if not kernels:
        layers.append(on_host)
    else:  # computing before communication, which it hides; without a kernel, the time that the host waits for others
        waits = np.isin(on_host, [_CODES[DATA_WAIT], _CODES[COMMUNICATION]])
        layers = [np.where(waits, on_host, np.where(on_host == _IDLE, layers[0], _IDLE))]
        for hides in (False, True):
            layers.append(time.paint(_last_first(k for k in kernels if (k.line != COMMUNICATION) == hides)))
    return time.milliseconds(layers)


def table(times: Mapping[str, float], num_steps: int, heading: str) -> str:
    """The lines and their sum as milliseconds a step and share."""
    whole = sum(times.values())
    rows = [(line, times[line]) for line in LINES] + [("a step", whole)]
    lines = [f"  {name:<16} {ms / num_steps:12.2f} ms {100 * ms / max(whole, 1e-9):6.1f} %" for name, ms in rows]
    return "\n".join([heading, *lines])


# ---- lines of events ------------------------------------------------------------------------------------------------
def _compiled(rules: Sequence[tuple[str, str]]) -> list[tuple[str, re.Pattern[str]]]:
    return [(line, re.compile(pattern)) for line, pattern in rules]


_OWNER_PATTERNS, _OPERATOR_PATTERNS, _RANGE_PATTERN = _compiled(_OWNERS), _compiled(_OPERATORS), re.compile(_RANGES)
_RANK = {line: rank for rank, (line, _) in enumerate(_OWNERS)}


class _Label(NamedTuple):
    """Lines that an event names for itself and for the events inside."""

    owner: str | None
    operator: str | None
    is_range: bool

    def line(self) -> str | None:
        """The line of its own time."""
        return self.owner or self.operator or (None if self.is_range else "other")

    def inside(self, outer: _Label) -> _Label:
        """The same event inside another one."""
        owners = [owner for owner in (self.owner, outer.owner) if owner is not None]
        owner = min(owners, key=_RANK.__getitem__, default=None)
        return _Label(owner, self.operator or outer.operator, self.is_range)


_LABELS: dict[str, _Label] = {}


def _label(name: str) -> _Label:
    if name not in _LABELS:
        bare = name.removeprefix(_NODE)
        owner, operator = (
            next((line for line, pattern in rules if pattern.match(bare)), None)
            for rules in (_OWNER_PATTERNS, _OPERATOR_PATTERNS)
        )
        _LABELS[name] = _Label(owner, operator, _RANGE_PATTERN.match(bare) is not None)
    return _LABELS[name]


def _own_line(event: Event) -> str | None:
    return _label(event.name).line()


def _nested(events: Iterable[Event]) -> Iterator[tuple[Event, _Label]]:
    """Events of a thread with their labels, each after the ones around it, which it does not outlast."""
    stack: list[tuple[int, _Label]] = []
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        while stack and stack[-1][0] <= event.start:
            stack.pop()
        label = _label(event.name)
        if stack:
            event, label = replace(event, end=min(event.end, stack[-1][0])), label.inside(stack[-1][1])
        yield event, label
        stack.append((event.end, label))


def _kernels(kernels: Iterable[Event], threads: Iterable[Iterable[Event]]) -> list[Interval]:
    """Kernels by the lines of the operators that launched them."""
    launchers = {event.number: label for events in threads for event, label in _nested(events) if event.number}
    found = []
    for kernel in kernels:
        label, outer = _label(kernel.name), launchers.get(kernel.number)
        found.append(Interval(kernel.start, kernel.end, (label if outer is None else label.inside(outer)).line()))
    return found


# ---- intervals of time ----------------------------------------------------------------------------------------------
class Interval(NamedTuple):
    """`start` to `end` in ns, and the line of the table; None where there is nothing."""

    start: int
    end: int
    line: str | None


def _last_first(intervals: Iterable[Interval]) -> list[Interval]:
    """Order of painting for overlapping intervals: the one that began first is painted last, and so is seen."""
    return sorted(intervals, reverse=True)


class Timeline:
    """The traced steps, cut wherever an interval begins or ends."""

    def __init__(self, steps: Event, intervals: Iterable[Interval]) -> None:
        cuts = [time for interval in intervals for time in interval[:2]]
        self._cuts = np.unique(np.clip([steps.start, steps.end, *cuts], steps.start, steps.end))

    def paint(self, intervals: Iterable[Interval]) -> np.ndarray:
        """Code of the line of each cut, of the last interval that covers it."""
        codes = np.full(len(self._cuts) - 1, _IDLE)
        for start, end, line in intervals:
            first, last = np.searchsorted(self._cuts, (start, end))
            codes[first:last] = _CODES.get(line, _IDLE)
        return codes

    def milliseconds(self, layers: Sequence[np.ndarray]) -> dict[str, float]:
        """The time of each line, of layers that hide those before them."""
        codes = np.full(len(self._cuts) - 1, _IDLE)
        for layer in layers:
            codes = np.where(layer == _IDLE, codes, layer)
        total = np.bincount(codes, np.diff(self._cuts), len(LINES))
        return {line: float(ns) / 1e6 for line, ns in zip(LINES, total, strict=True)}


# ---- the callback ---------------------------------------------------------------------------------------------------
class ProfileCallback:
    """A torch profiler trace of `num_steps` steps after step `start`, and a table of where their time went.

    Runs after all other callbacks of step `start`. `end`, a callback of its own, runs before all others, so that only
    callbacks between the traced steps are in the trace.
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
        _synchronize(trainer)
        self._range.__enter__()

    def _end(self, trainer: TrainingLoop) -> None:
        self.end.every = None
        _synchronize(trainer)
        self._range.__exit__(None, None, None)
        self._profiler.stop()
        name, num_steps = f"steps_{self.start + 1}-{self.stop}", self.stop - self.start
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}_rank_{trainer.backend.rank}.json"
        self._profiler.export_chrome_trace(str(trace))
        times = time_by_line(events_of(self._profiler))
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


def _synchronize(trainer: TrainingLoop) -> None:
    if trainer.backend.device.type == "cuda":
        torch.cuda.synchronize(trainer.backend.device)


def with_profile(
    callbacks: list[Callback], args: TrainerArgs, step: int, say: Callable[[str], None]
) -> list[Callback]:
    """Callbacks of a training that starts after `step`, with those of `--profile` if it is given."""
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
