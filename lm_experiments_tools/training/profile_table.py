"""Time of a training step by what it is spent on: the events of torch's profiler, added up in nine lines.

Each moment of the traced steps belongs to one line, so that the lines sum to the wall time. On a CPU it is that of the
innermost operator which the training thread is in; on a GPU that of the kernel which runs, by the operator that
launched it. The backward pass calls operators of the same names, inside nodes named after those of the forward pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LINES = (
    "matmul", "attention", "loss", "optimizer", "data wait", "communication", "copies and casts", "other", "idle",
)  # fmt: skip
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


class Piece(NamedTuple):
    """A line's part of the time, `start` to `end` in ns; None where there is nothing."""

    start: int
    end: int
    line: str | None


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
    whole = next(event for event in by_place["host"] if event.name == STEPS)
    threads: dict[int, list[Event]] = {}
    for event in by_place["host"]:
        threads.setdefault(event.thread, []).append(event)
    host = [piece for piece in _innermost(threads[whole.thread]) if whole.start <= piece.start < whole.end]
    sent = [Piece(e.start, e.end, line) for e in by_place["background"] if (line := _own_line(e)) == COMMUNICATION]
    pieces = _filled(host, _flat(sent, whole))
    if by_place["device"]:
        pieces = _on_device(by_place["device"], _launchers(threads.values()), pieces, whole)
    total = Counter(dict.fromkeys(LINES, 0))
    for piece in pieces:
        total[piece.line or "idle"] += piece.end - piece.start
    return {line: nanoseconds / 1e6 for line, nanoseconds in total.items()}


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


def _nested(events: Iterable[Event]) -> Iterator[tuple[Event, _Label, int]]:
    """Events of a thread in the order of their beginning, each with its label and the number of events around it."""
    stack: list[tuple[int, _Label]] = []
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        while stack and stack[-1][0] <= event.start:
            stack.pop()
        label = _label(event.name)
        if stack:
            label = label.inside(stack[-1][1])
        yield event, label, len(stack)
        stack.append((event.end, label))


# ---- pieces of time -------------------------------------------------------------------------------------------------
def _innermost(events: Iterable[Event]) -> Iterator[Piece]:
    """The time of a thread, each moment to the innermost event; an event ends no later than the one around it."""
    open_: list[Piece] = []
    now = 0
    for event, label, depth in _nested(events):
        while len(open_) > depth:
            last = open_.pop()
            yield Piece(now, last.end, last.line)
            now = last.end
        if open_:
            yield Piece(now, event.start, open_[-1].line)
        end = min(event.end, open_[-1].end) if open_ else event.end
        open_.append(Piece(event.start, end, label.line()))
        now = event.start
    while open_:
        last = open_.pop()
        yield Piece(now, last.end, last.line)
        now = last.end


def _flat(pieces: Iterable[Piece], whole: Event) -> list[Piece]:
    """Pieces that overlap, as ones that do not and fill the whole; of several at once the one that began first."""
    now, found = whole.start, []
    for piece in sorted(pieces):
        start, end = max(piece.start, now), min(piece.end, whole.end)
        if end > start:
            found += [Piece(now, start, None)] * (start > now) + [Piece(start, end, piece.line)]
            now = end
    return found + [Piece(now, whole.end, None)] * (whole.end > now)


def _filled(pieces: Iterable[Piece], others: Sequence[Piece]) -> list[Piece]:
    """Pieces, with the lines of `others`, as ordered as they are, where they have none."""
    found, i = [], 0
    for piece in pieces:
        if piece.line is not None or piece.end <= piece.start:
            found.append(piece)
            continue
        while i < len(others) and others[i].end <= piece.start:
            i += 1
        k = i
        while k < len(others) and others[k].start < piece.end:
            other = others[k]
            found.append(Piece(max(piece.start, other.start), min(piece.end, other.end), other.line))
            k += 1
    return found


def _launchers(threads: Iterable[Iterable[Event]]) -> dict[int, _Label]:
    return {event.number: label for events in threads for event, label, _ in _nested(events) if event.number}


def _on_device(kernels: list[Event], launchers: dict[int, _Label], host: list[Piece], whole: Event) -> list[Piece]:
    """Computing before communication, which it hides; where no kernel runs, what the host waits for, if it is that."""
    running = []
    for kernel in kernels:
        label, outer = _label(kernel.name), launchers.get(kernel.number)
        line = (label if outer is None else label.inside(outer)).line()
        running.append(Piece(kernel.start, kernel.end, line))
    computing = _flat((p for p in running if p.line != COMMUNICATION), whole)
    sending = _flat((p for p in running if p.line == COMMUNICATION), whole)
    waits = (DATA_WAIT, COMMUNICATION)
    waited = _flat((p for p in host if p.line in waits), whole)
    return _filled(_filled(computing, sending), waited)
