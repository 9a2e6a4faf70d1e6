"""The job of the seqio worker, which is the process that runs TensorFlow, and the names of its files."""

from __future__ import annotations

from dataclasses import dataclass

PADDING = -100  # in the rows that are sent: no token id, so that a real id 0 is not mistaken for it
SOCKET, VALIDATION = "socket", "validation.int32"  # files in the job's folder


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of the process that runs TensorFlow: the seqio task to build, and whom to send its examples to.

    Attributes:
        task: "span_corruption" or "prefix_lm" over `data_path`, or "module:name" of a registered task.
        inputs_length, targets_length: seqio's `task_feature_lengths`.
        rejected_path: file that lists records of the text that cannot be used.
        validation: True to make validation examples too, at most `valid_samples`.
        threads: number of TensorFlow's threads.
        clients: number of training processes on this machine.
        folder: temporary folder of the process, which deletes it at its end.
    """

    task: str
    data_path: list[str]
    text_key: str
    document_per_line: bool = False
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
    """Return the type of an exception and the first line of its message."""
    first = next((line for line in str(error).splitlines() if line.strip()), "no message").strip()
    if first.startswith("{{") and "}}" in first:
        first = first.partition("}}")[2].strip() or first
    return f"{type(error).__name__}: {first}"
