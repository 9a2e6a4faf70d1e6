"""seqio Tasks and Mixtures, and the training examples that they give. This module imports TensorFlow.

The user's module registers a task. Its examples are those of `seqio.get_dataset(task, lengths, num_epochs=None,
shuffle=True, seed=seed)`, for any number of training processes and threads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import seqio
import tensorflow as tf

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.seqio.job import Job

logger = logging.getLogger(__name__)

FEATURES = ("inputs", "targets")
_VERSION = 3  # of the mapping (text, settings, seed) -> stream; part of the fingerprint
_AHEAD = 4  # batches prepared before they are asked for
_VALIDATION_ROWS = 256  # written at a time
_PROGRESS_SECONDS = 30.0


def limit_threads(num_threads: int) -> None:
    """Limit the number of TensorFlow's threads. This must be called before TensorFlow computes anything."""
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)
    tf.config.threading.set_intra_op_parallelism_threads(num_threads)


class TaskExamples:
    """Training and validation examples of the seqio task that a job names.

    Raises:
        UserError: the task does not exist, has no examples, or has other features or another vocabulary than the run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.vocabulary = Tokenizer.load(job.vocab_path)
        tf.config.experimental.enable_op_determinism()  # the user's functions may draw without a seed
        tf.random.set_seed(job.seed)
        self.task = registered_task(job.task)
        self.title = f"seqio {type(self.task).__name__} {self.task.name}"
        self._subtasks = seqio.get_subtasks(self.task)
        with self._user_errors():
            self._check_vocabulary()
            self._check_splits()
            self._check_first_example()

    def batches(self, start: int, rows: int) -> Iterator[np.ndarray]:
        """Yield endless training batches, for all training processes together.

        Earlier examples are made and skipped, because seqio's shuffle buffers depend on them.

        Yields:
            int32[rows, inputs_length + targets_length], inputs and targets padded to their maximum lengths.
        """
        used, rest = divmod(start, rows)
        batches = self._padded(self._dataset("train", num_epochs=None).skip(rest), rows)
        logged = time.monotonic()
        for done in range(used):
            next(batches)
            if (now := time.monotonic()) - logged > _PROGRESS_SECONDS:
                logged = now
                logger.info("seeking in the data: %d of %d examples", done * rows, start)
        yield from batches

    def validation(self) -> Iterator[np.ndarray]:
        """Yield the validation examples of the task once, at most `valid_samples`, in batches like `batches` does."""
        with self._user_errors():
            dataset = self._dataset("validation", num_epochs=1)
            if self.job.valid_samples is not None:
                dataset = dataset.take(self.job.valid_samples)
            yield from self._padded(dataset, _VALIDATION_ROWS)

    def fingerprint(self) -> str:
        """sha256 over data, task, lengths, vocabulary, seed and versions of the packages.

        The code of the task's preprocessing steps is not included, only their names and plain arguments.
        """
        job = self.job
        parts = {
            "version": [_VERSION, tf.__version__, seqio.__version__],
            "task": [job.task, [self._describe(task) for task in self._subtasks]],
            "lengths": [job.inputs_length, job.targets_length],
            "vocabulary": self.vocabulary.fingerprint,
            "seed": job.seed,
        }
        return json_sha256(parts)

    def _describe(self, task: seqio.Task) -> list[Any]:
        shards = task.source.list_shards("train" if "train" in task.splits else task.splits[0])
        files = [[os.path.basename(s), os.path.getsize(s) if os.path.isfile(s) else None] for s in map(str, shards)]
        rate = self.task.get_rate(task) if isinstance(self.task, seqio.Mixture) else 1.0
        steps = [step_name(step) for step in task.preprocessors]
        return [task.name, float(rate), type(task.source).__name__, files, steps]

    # ---- datasets
    def _dataset(self, split: str, *, num_epochs: int | None, shuffle: bool = True) -> tf.data.Dataset:
        """seqio's examples {"inputs": int32[n], "targets": int32[m]}, not longer than asked for."""
        tf.random.set_seed(self.job.seed)  # each time: it also starts the count of the functions without a seed
        lengths = {"inputs": self.job.inputs_length, "targets": self.job.targets_length}
        shuffle = shuffle and self._may_shuffle()
        dataset = self.task.get_dataset(
            lengths, split=split, shuffle=shuffle, seed=self.job.seed, num_epochs=num_epochs
        )
        for name in FEATURES:
            spec = dataset.element_spec.get(name)
            if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 1 or not spec.dtype.is_integer:
                raise UserError(f"--task {self.job.task} must give {name!r} as token ids, but it is {spec}")
        return dataset.map(_token_ids)

    def _may_shuffle(self) -> bool:
        """False for a task without a shuffle buffer, which seqio refuses to shuffle."""
        return all(t.shuffle_buffer_size is not None or t.source.performs_internal_shuffling for t in self._subtasks)

    def _padded(self, dataset: tf.data.Dataset, rows: int) -> Iterator[np.ndarray]:
        lengths = {"inputs": [self.job.inputs_length], "targets": [self.job.targets_length]}
        options = tf.data.Options()
        options.deterministic = True
        options.threading.private_threadpool_size = self.job.threads
        dataset = dataset.padded_batch(rows, padded_shapes=lengths, padding_values=IGNORED_LABEL)
        for batch in dataset.prefetch(_AHEAD).with_options(options).as_numpy_iterator():
            ids = np.concatenate([batch[name] for name in FEATURES], axis=1)
            if ids.max(initial=0) >= self.vocabulary.size:
                raise UserError(f"--task {self.job.task} gave token id {ids.max()}, which --vocab does not have")
            yield ids

    # ---- checks
    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        """Turn errors of seqio and TensorFlow into UserErrors while a task is built."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, TypeError, AssertionError, OSError, tf.errors.OpError) as error:
            prepared = [t.source.tfds_dataset for t in self._subtasks if isinstance(t.source, seqio.TfdsDataSource)]
            hint = "".join(f"; {d.name} must lie prepared in {d.data_dir or 'TFDS_DATA_DIR'}" for d in prepared)
            raise UserError(
                f"--task {self.job.task} gives no examples: {type(error).__name__}: {first_line(error)}{hint}"
            ) from error

    def _check_vocabulary(self) -> None:
        for name in FEATURES:
            if name not in self.task.output_features:
                raise UserError(f"--task {self.job.task} has no feature {name!r}, which an encoder-decoder needs")
            theirs = self.task.output_features[name].vocabulary
            path = getattr(theirs, "sentencepiece_model_file", None)
            if path is not None and os.path.isfile(path):
                if Tokenizer.load(path, theirs.extra_ids).fingerprint != self.vocabulary.fingerprint:
                    raise UserError(f"--task {self.job.task} has the vocabulary {path}: give it as --vocab")
            if theirs.vocab_size > self.vocabulary.size:
                raise UserError(
                    f"--task {self.job.task} has {theirs.vocab_size} ids, --vocab {self.job.vocab_path} only "
                    f"{self.vocabulary.size}: give the --vocab of the task"
                )

    def _check_splits(self) -> None:
        for split in ("train", "validation") if self.job.validation else ("train",):
            if split not in self.task.splits:
                raise UserError(f"--task {self.job.task} has no split {split!r}, only {', '.join(self.task.splits)}")

    def _check_first_example(self) -> None:
        """Refuse a task without examples, which would be repeated forever."""
        for _ in self._padded(self._dataset("train", num_epochs=1, shuffle=False).take(1), 1):
            return
        raise UserError(f"--task {self.job.task} gives no example from its split 'train'")


@tf.autograph.experimental.do_not_convert
def _token_ids(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {name: tf.cast(example[name], tf.int32) for name in FEATURES}


# ---- the user's tasks


def registered_task(name: str) -> seqio.Task | seqio.Mixture:
    """Return the seqio Task or Mixture that a user's module registers, after importing the module.

    Raises UserError: the module cannot be imported, or does not register this task.
    """
    module, _, task_name = name.partition(":")
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {first_line(error)} ({where.filename} line {where.lineno})"
        raise UserError(f"--task {name}: importing the module {module} fails with {cause}") from error
    known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    if task_name not in known:
        shown = ", ".join(sorted(known)[:20]) or "none at all"
        raise UserError(f"--task {name}: {module} registers no seqio Task or Mixture {task_name!r}; there is {shown}")
    task = seqio.get_mixture_or_task(task_name)
    for subtask in seqio.get_subtasks(task):
        if isinstance(subtask.source, seqio.FunctionDataSource):
            _accept_seed(subtask.source)
    return task


def _accept_seed(source: seqio.FunctionDataSource) -> None:
    """Let seqio seed a `dataset_fn(split, shuffle_files)` of t5's first years, which it otherwise refuses."""
    function = source._dataset_fn
    if "seed" not in inspect.signature(function).parameters:

        def with_seed(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
            return function(split, shuffle_files)

        source._dataset_fn = with_seed


def step_name(step: Any) -> list[str]:
    """Return the name of a task's preprocessing step and, for a `functools.partial`, its plain arguments."""
    bound: list[str] = []
    while isinstance(step, functools.partial):
        values = [*enumerate(step.args), *sorted(step.keywords.items())]
        bound += [
            f"{name}={value!r}" for name, value in values if isinstance(value, (bool, int, float, str, list, tuple))
        ]
        step = step.func
    return [seqio.utils.function_name(step) or type(step).__name__, *bound]
