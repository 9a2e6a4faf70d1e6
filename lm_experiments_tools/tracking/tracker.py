"""Log metrics on rank 0 to metrics.jsonl, TensorBoard, other services and the console.

metrics.jsonl has one JSON object per `log` call. TensorBoard files are written with tensorboard's protocol classes,
because `torch.utils.tensorboard` imports TensorFlow where it is installed.

After a restart at step k, records of later steps move to metrics.superseded.jsonl, and TensorBoard purges them. The
purge also drops all points whose x-axis is samples or tokens, so those are written again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lm_experiments_tools.files import dump_json, fsync_path, naming, to_jsonable, write_atomic
from lm_experiments_tools.tracking.notebook import LiveCurve, live_curve
from lm_experiments_tools.tracking.progress import make_bar, shows_progress
from lm_experiments_tools.tracking.services import Services

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_AXES = ("iterations", "samples", "tokens")
_ON_AXES = ("gradients_global_norm", "weights_global_norm", "patience")  # tag/{iterations,samples,tokens}
_TAGS = {
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "memory_mib": "memory/peak_mib",
    "data_wait_fraction": "time_metrics/data_wait_fraction",
    "skipped_updates": "nonfinite/count",
}
_SHOWN = {
    "lr": lambda value: f"lr {value:.1e}",
    "gradients_global_norm": lambda value: f"gnorm {value:.2f}",
    "tokens_per_second": lambda value: f"{_thousands(value)} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "memory_mib": lambda value: f"mem {value / 1024:.1f} GiB",
    "data_wait_fraction": lambda value: f"data {100 * value:.1f}%",
}  # of the console line
_PER_GROUP = ("lr", "scaled_lr")
_POSITION = ("step", "split", "samples", "tokens", "time")


def save_metrics(path: Path | str, metrics: dict[str, Any]) -> None:
    """Write metrics to a JSON file atomically. Values of numpy and torch are converted; NaN becomes null."""
    write_atomic(Path(path), dump_json(metrics) + "\n")


class Tracker:
    """Logs the metrics of a run to its files, TensorBoard, other services and the console.

    Use it as a context manager. Only rank 0 logs; on other ranks every method does nothing.

    Args:
        run_dir: folder for the files; None logs to the console only.
        start_step: number of updates already applied. Records of later steps in `run_dir` are replaced (-1: all).
        again: names of splits ("train", "valid", ...) whose records of `start_step` itself are replaced too.
        total_steps: updates of the whole run, for the remaining time and the progress bar; None shows neither.
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        *,
        rank: int,
        start_step: int = 0,
        again: Collection[str] = (),
        total_steps: int | None = None,
    ):
        self.active = rank == 0
        self._jsonl: IO[str] | None = None
        self._events: EventFile | None = None
        self._services: Services | None = None
        self.console: ConsoleLine | None = None
        self.bar: tqdm | None = None
        self.curve: LiveCurve | None = None
        if not self.active:
            return
        self.curve = live_curve()
        self.console, self.bar = ConsoleLine(total_steps), progress_bar(total_steps, max(start_step, 0), sys.stderr)
        if run_dir is None:
            return
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        kept, purge_step = _cut_records(directory / "metrics.jsonl", start_step, again)
        self._jsonl = open(directory / "metrics.jsonl", "a", encoding="utf-8")
        self._services = Services(directory)
        if self._services.tensorboard:
            self._open_tensorboard(directory, purge_step, kept)

    def _open_tensorboard(self, directory: Path, purge_step: int, kept: list[dict[str, Any]]) -> None:
        try:
            self._events = EventFile(directory, purge_step=purge_step)
        except ImportError as error:
            logger.warning("TensorBoard files are not written (%s): pip install tensorboard; see metrics.jsonl", error)
            return
        for record in kept:
            for tag, value, x in _scalars(record):
                if x >= purge_step:
                    self._events.scalar(tag, value, x, record["time"])
        self._events.flush()

    def log(
        self,
        split: str,
        step: int,
        samples: int,
        tokens: int,
        metrics: dict[str, float],
        *,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Write the metrics of one split at one step to metrics.jsonl, TensorBoard, other services and the console.

        Args:
            step, samples, tokens: updates applied, examples and tokens consumed so far, over all workers.
            metrics: means over `split`. TensorBoard tags are `{name}/iterations/{split}`, `{name}/samples/{split}` and
                `{name}/tokens/{split}`.
            extra: other numbers, such as gradients_global_norm, tokens_per_second, memory_mib or param_groups (lr and
                scaled_lr of each group). TensorBoard tags are `{name}/iterations`.

        Raises:
            ValueError: a name in both `metrics` and `extra`, or one of `step, split, samples, tokens, time`.
        """
        if not self.active:
            return
        numbers = dict(extra or {})
        clash = [name for name in (*metrics, *numbers) if name in _POSITION] + [n for n in metrics if n in numbers]
        if clash:
            raise ValueError(f"{clash[0]} is given twice to Tracker.log or is a reserved name")
        position = {"step": step, "split": split, "samples": samples, "tokens": tokens}
        scalars = {**metrics, **_flat_groups(numbers)}
        record = {**position, **scalars, "metrics": list(metrics), "time": time.time()}
        if self._jsonl is not None:
            with naming(self._jsonl.name):
                self._jsonl.write(dump_json(record, indent=None) + "\n")
                self._jsonl.flush()
        if self._events is not None:
            for tag, value, x in _scalars(record):
                self._events.scalar(tag, value, x, record["time"])
            self._events.flush()
        if self._services is not None:
            self._services.log(record)
        self.console.report(split, step, metrics, scalars)
        if _is_number(loss := metrics.get("loss")) and loss is not None:
            if self.bar is not None and split == "train":
                self.bar.set_postfix_str(f"loss {_short(loss)}")
            # Test data is evaluated once, after training: a point, not a curve.
            if self.curve is not None and split != "test":
                self.curve.add(split, step, _number(loss))

    def close(self) -> None:
        for part in (self.bar, self._events, self._jsonl, self._services):
            if part is not None:
                part.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def progress_bar(total_steps: int | None, start_step: int, stream: IO[str]) -> tqdm | None:
    """Draw a progress bar of training on a terminal or in a notebook. Returns None elsewhere."""
    if not (total_steps and shows_progress(stream)):
        return None
    colour = None if os.environ.get("NO_COLOR") else "green"
    options = {"total": total_steps, "initial": start_step, "file": stream, "colour": colour, "disable": False}
    return make_bar(desc="train", delay=0, **options)


class ConsoleLine:
    """Log lines to the console and the log file:

    `step 1200/65536 | loss 2.431 | lr 9.8e-03 | gnorm 0.61 | 41.2k tok/s | mem 61.2 GiB | data 1.8% | eta 9h12m`
    """

    def __init__(self, total_steps: int | None):
        self.total_steps = total_steps
        self._first: tuple[int, float] | None = None

    def report(self, split: str, step: int, metrics: dict[str, float], numbers: dict[str, Any]) -> None:
        """Log one line of means over the data `split` and of other numbers, such as lr; nothing without means."""
        if metrics:
            logger.info(self.format(split, step, metrics, numbers))

    def format(self, split: str, step: int, metrics: dict[str, float], numbers: dict[str, Any]) -> str:
        total = f"/{self.total_steps}" if self.total_steps else ""
        parts = [f"step {step}{total}" if split == "train" else f"step {step}{total} {split}"]
        parts += [f"{name} {_short(value)}" for name, value in metrics.items() if _is_number(value)]
        for name, show in _SHOWN.items():
            if isinstance(value := numbers.get(name), (int, float)):
                parts.append(show(value))
        if numbers.get("skipped_updates"):
            parts.append(f"skipped {numbers['skipped_updates']:.0f}")
        if "seconds_per_step" in numbers and self.total_steps:
            left = max(self.total_steps - step, 0)
            parts.append(f"eta {duration(left * self._seconds_per_step(step, numbers['seconds_per_step']))}")
        return " | ".join(parts)

    def _seconds_per_step(self, step: int, measured: float) -> float:
        """Of a step since the first line, validation and checkpoints included; for that line the `measured` ones."""
        now = time.monotonic()
        first, start = self._first = self._first or (step, now)
        return (now - start) / (step - first) if step > first else measured


class EventFile:
    """A TensorBoard event file, to which metrics are written. Raises ImportError without tensorboard."""

    def __init__(self, directory: Path, purge_step: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2, summary_pb2
        # TensorBoard reads files in the order of their names, so the time in the name must grow even when two starts
        # fall into one second or the clock has been set back
        times = [
            re.match(r"events\.out\.tfevents\.(\d+)", file.name) for file in directory.glob("events.out.tfevents.*")
        ]
        stamp = max([int(time.time()), *(int(match[1]) + 1 for match in times if match)])
        self.path = directory / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self.path, "wb")
        self._writer = RecordWriter(self._file)
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=start))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def scalar(self, tag: str, value: float, step: int, wall_time: float) -> None:
        summary = self._summary.Summary(value=[self._summary.Summary.Value(tag=tag, simple_value=value)])
        self._write(self._event.Event(wall_time=wall_time, step=step, summary=summary))

    def flush(self) -> None:
        with naming(self.path):
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_records(path: Path, start_step: int, again: Collection[str]) -> tuple[list[dict[str, Any]], int]:
    """Move records after `start_step`, those of `again` there, and torn lines to metrics.superseded.jsonl.

    Returns the remaining records, and the first step that TensorBoard is to forget.
    """
    purge_step = start_step + 1
    if not path.exists():
        return [], purge_step
    kept, lines, superseded = [], [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = parse_record(line)
        redone = record is not None and record["step"] == start_step and record["split"] in again
        if redone:
            purge_step = start_step
        if record is not None and record["step"] <= start_step and not redone:
            kept.append(record)
            lines.append(line)
        elif line.strip():
            superseded.append(line)
    if superseded:
        with open(path.with_suffix(".superseded.jsonl"), "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in superseded)
        fsync_path(path.with_suffix(".superseded.jsonl"))
        write_atomic(path, "".join(f"{line}\n" for line in lines))
    return kept, purge_step


def parse_record(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None for anything but a whole record, such as the last line of a killed run."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(name in record for name in (*_POSITION, "metrics"))
    return record if whole and isinstance(record["step"], int) else None


def _flat_groups(numbers: dict[str, Any]) -> dict[str, Any]:
    """`lr` becomes that of group 0 (what people plot) and, with several groups, `lr_param_groups` all of them."""
    groups = numbers.pop("param_groups", [])
    for name in _PER_GROUP:
        if values := [group[name] for group in groups if name in group]:
            numbers[name] = values[0]
            if len(values) > 1:
                numbers[f"{name}_param_groups"] = values
    return {name: value for name, value in numbers.items() if value is not None}


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """(tag, value, x) of every TensorBoard point of a record; the inverse direction of metrics.jsonl."""
    x = {"iterations": record["step"], "samples": record["samples"], "tokens": record["tokens"]}
    for name, value in record.items():
        if name in (*_POSITION, "metrics") or name.endswith("_param_groups"):
            continue
        for tag, axis in _tags(name, record):
            if name in _PER_GROUP:
                for j, group in enumerate(record.get(f"{name}_param_groups") or [value]):
                    yield f"{tag}/param_group_{j}", _number(group), x[axis]
            elif _is_number(value):
                yield tag, _number(value), x[axis]


def _tags(name: str, record: dict[str, Any]) -> list[tuple[str, str]]:
    clean = re.sub(r"[^-/\w.]", "_", name)
    if name in record["metrics"]:
        return [(f"{clean}/{axis}/{record['split']}", axis) for axis in _AXES]
    if name in (*_ON_AXES, *_PER_GROUP):
        return [(f"{clean}/{axis}", axis) for axis in _AXES]
    if name == "seconds_per_step":
        return [(f"time/{axis}/per_iter", axis) for axis in _AXES]
    return [(_TAGS.get(name, f"{clean}/iterations"), "iterations")]


def _is_number(value: Any) -> bool:
    """Per-class lists and strings are for metrics.jsonl only."""
    return isinstance(to_jsonable(value), (int, float, type(None)))


def _number(value: Any) -> float:
    plain = to_jsonable(value)
    return math.nan if plain is None else float(plain)


def _short(value: Any) -> str:
    number = _number(value)
    return f"{number:.3f}" if 1e-3 <= abs(number) < 1e4 or number == 0 else f"{number:.3g}"


def _thousands(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.1f}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.1f}G"


def duration(seconds: float) -> str:
    """Format a time as 42s, 3m05s, 2h10m or 1d04h."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if hours:
        return f"{days}d{hours % 24:02d}h" if days else f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{int(seconds) % 60:02d}s" if minutes else f"{int(seconds)}s"
