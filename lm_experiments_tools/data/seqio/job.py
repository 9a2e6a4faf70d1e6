"""The job of the seqio worker, which is the process that runs TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass


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
