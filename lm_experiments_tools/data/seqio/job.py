"""The job of the worker that owns TensorFlow, and its files."""

from __future__ import annotations

from dataclasses import dataclass

PADDING = -100  # in the rows that are sent: no token id, so that a real id 0 is not mistaken for it
SOCKET, VALIDATION = "socket", "validation.int32"  # files in the job's folder


@dataclass(frozen=True, kw_only=True)
class Job:
    """The worker's task.

    Attributes:
        task: span_corruption or prefix_lm over `data_path`, or module:name.
        inputs_length, targets_length: seqio's `task_feature_lengths`.
        rejected_path: file for rejected records.
        validation: make the examples of the validation split, at most `valid_samples`, before training.
        threads: number of TensorFlow's threads.
        clients: training processes on this machine.
        folder: private to this worker and its clients; the worker removes it.
    """

    task: str
    data_path: list[str]
    text_key: str
    max_bad_lines: int | None
    rejected_path: str
    vocab_path: str
    inputs_length: int
    targets_length: int
    noise_density: float
    mean_noise_span_length: float
    seed: int
    validation: bool
    valid_samples: int | None
    threads: int
    clients: int
    folder: str


def one_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message, without TensorFlow's name of the failing node."""
    first = next((line for line in str(error).splitlines() if line.strip()), "no message").strip()
    if first.startswith("{{") and "}}" in first:
        first = first.partition("}}")[2].strip() or first
    return f"{type(error).__name__}: {first}"
