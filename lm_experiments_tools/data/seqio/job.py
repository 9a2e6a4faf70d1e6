"""The job of the seqio worker, which is the process that runs TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass

PADDING = -100  # in the rows that are sent: no token id, so that a real id 0 is not mistaken for it


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of the process that runs TensorFlow.

    Attributes:
        task: "module:name" of a registered task.
        inputs_length, targets_length: seqio's `task_feature_lengths`.
        validation: True if validation examples are needed too, at most `valid_samples`.
    """

    task: str
    vocab_path: str
    inputs_length: int
    targets_length: int
    seed: int
    validation: bool
    valid_samples: int | None
    threads: int


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    first = next((line for line in str(error).splitlines() if line.strip()), "no message").strip()
    if first.startswith("{{") and "}}" in first:
        first = first.partition("}}")[2].strip() or first
    return f"{type(error).__name__}: {first}"
