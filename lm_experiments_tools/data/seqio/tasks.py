"""seqio Tasks and Mixtures, and the training examples that they give. This module imports TensorFlow.

A task is t5's `span_corruption` or `prefix_lm` over the user's raw text, or is registered by the user's module. Its
examples are those of `seqio.get_dataset(task, lengths, num_epochs=None, shuffle=True, seed=seed)`, for any number of
training processes and threads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from sentencepiece import sentencepiece_model_pb2

from lm_experiments_tools.data.seqio.worker import PADDING, Job, one_line
from lm_experiments_tools.data.text.records import (
    Record,
    Rejected,
    RejectedRecords,
    lines_before,
    no_documents,
    read_shard,
)
from lm_experiments_tools.data.text.sources import Shard, content_of, plan_shards
from lm_experiments_tools.data.text.tokenizer import Tokenizer, sentinel_piece
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256, write_atomic

FEATURES = ("inputs", "targets")
_VERSION = 2  # of the mapping (text, settings, seed) -> stream; part of the fingerprint
_AHEAD = 4  # batches prepared before they are asked for
_VALIDATION_ROWS = 256  # written at a time
_PROGRESS_SECONDS = 30.0
_SMALL_TEXT = 1 << 20  # bytes
_COMPRESSION = 16  # of a .gz file at most, as text goes
_UNUSED = sentencepiece_model_pb2.ModelProto.SentencePiece.UNUSED

Log = Callable[[int, str], None]


def limit_threads(num_threads: int) -> None:
    """Limit the number of TensorFlow's threads. This must be called before TensorFlow computes anything."""
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)
    tf.config.threading.set_intra_op_parallelism_threads(num_threads)


class TaskExamples:
    """Training and validation examples of the seqio task that a job names.

    Raises:
        UserError: the task does not exist, has no examples, or has other features or another vocabulary than the run.
    """

    def __init__(self, job: Job, log: Log) -> None:
        self.job, self._log = job, log
        self.vocabulary = Tokenizer.load(job.vocab_path)
        self._text: TextSource | None = None
        if ":" in job.task:
            tf.config.experimental.enable_op_determinism()  # the user's functions may draw without a seed
            tf.random.set_seed(job.seed)
            self.task = registered_task(job.task)
        else:
            self._text = TextSource(job, log)
            self.task = text_task(job, self._text.source(), self.vocabulary)
        self._subtasks = seqio.get_subtasks(self.task)
        with self._user_errors():
            self._check_vocabulary()
            self._check_splits()
            self._check_first_example()

    @property
    def title(self) -> str:
        """Short description of the task, for the log."""
        if self._text is not None:
            return f"{self.job.task} by t5 {version('t5')}"
        return f"seqio {type(self.task).__name__} {self.task.name}"

    def batches(self, start: int, rows: int) -> Iterator[np.ndarray]:
        """Yield endless training batches, for all training processes together.

        Earlier examples are made and skipped, because seqio's shuffle buffers depend on them.

        Yields:
            int32[rows, inputs_length + targets_length], inputs and targets padded to their maximum lengths.
        """
        used, rest = divmod(start, rows)
        batches = self._padded(self._dataset("train", num_epochs=None).skip(rest), rows)
        begin = logged = time.monotonic()
        for done in range(used):
            next(batches)
            if (now := time.monotonic()) - logged > _PROGRESS_SECONDS:
                logged = now
                self._log(logging.INFO, f"seeking in the data: {done * rows:,} of {start:,} examples")
        if used:
            self._log(logging.INFO, f"found example {start:,} in {time.monotonic() - begin:.1f} s")
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
            "version": [_VERSION, tf.__version__, seqio.__version__, version("t5") if self._text else None],
            "task": [job.task, [self._describe(task) for task in self._subtasks]],
            "data": [job.text_key, content_of(self._text.shards)] if self._text else None,
            "lengths": [job.inputs_length, job.targets_length],
            "noise": [job.noise_density, job.mean_noise_span_length] if self._text else None,
            "vocabulary": self.vocabulary.fingerprint,
            "seed": job.seed,
        }
        return json_sha256(parts)

    def _describe(self, task: seqio.Task) -> list[Any]:
        shards = [] if self._text else task.source.list_shards("train" if "train" in task.splits else task.splits[0])
        files = [[os.path.basename(s), os.path.getsize(s) if os.path.isfile(s) else None] for s in map(str, shards)]
        rate = self.task.get_rate(task) if isinstance(self.task, seqio.Mixture) else 1.0
        steps = [step_name(step) for step in task.preprocessors]
        return [task.name, float(rate), type(task.source).__name__, files, steps]

    # ---- datasets
    def _dataset(self, split: str, *, num_epochs: int | None, shuffle: bool = True) -> tf.data.Dataset:
        """seqio's examples {"inputs": int32[n], "targets": int32[m]}, not longer than asked for."""
        tf.random.set_seed(self.job.seed)  # each time: it also starts the count of the functions without a seed
        lengths = {"inputs": self.job.inputs_length, "targets": self.job.targets_length}
        make = self.task.get_dataset
        if self._text is not None:  # t5's functions run without being converted by AutoGraph, which takes 8 s
            make = tf.autograph.experimental.do_not_convert(make)
        shuffle = shuffle and self._may_shuffle()
        dataset = make(lengths, split=split, shuffle=shuffle, seed=self.job.seed, num_epochs=num_epochs)
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
        dataset = dataset.padded_batch(rows, padded_shapes=lengths, padding_values=PADDING)
        try:
            for batch in dataset.prefetch(_AHEAD).with_options(options).as_numpy_iterator():
                yield self._checked(np.concatenate([batch[name] for name in FEATURES], axis=1))
        except tf.errors.OpError:
            if self._text is not None and self._text.failure is not None:
                raise self._text.failure from None
            raise

    def _checked(self, batch: np.ndarray) -> np.ndarray:
        if batch.max(initial=0) >= self.vocabulary.size:
            raise UserError(f"--task {self.job.task} gave token id {batch.max()}, which --vocab does not have")
        return batch

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
            raise UserError(f"--task {self.job.task} gives no examples: {one_line(error)}{hint}") from error

    def _check_vocabulary(self) -> None:
        for name in FEATURES:
            if name not in self.task.output_features:
                raise UserError(f"--task {self.job.task} has no feature {name!r}, which an encoder-decoder needs")
            theirs = self.task.output_features[name].vocabulary
            path = getattr(theirs, "sentencepiece_model_file", None)
            if self._text is None and path is not None and os.path.isfile(path):
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
        if not self._may_shuffle():
            self._log(logging.INFO, f"--task {self.job.task} is registered without shuffling")
        for _ in self._padded(self._dataset("train", num_epochs=1, shuffle=False).take(1), 1):
            return
        if self._text is not None:
            raise self._text.no_documents()
        raise UserError(f"--task {self.job.task} gives no example from its split 'train'")


@tf.autograph.experimental.do_not_convert
def _token_ids(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {name: tf.cast(example[name], tf.int32) for name in FEATURES}


# ---- the user's tasks


def registered_task(name: str) -> seqio.Task | seqio.Mixture:
    """Return the seqio Task or Mixture that a user's module registers, after importing the module.

    Args:
        name: "module:task", the importable module and the name under which it registers the task.

    Raises:
        UserError: the module cannot be imported, or does not register this task.
    """
    module, _, task_name = name.partition(":")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"--task {name}: the module {module} cannot be imported ({error})") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"--task {name}: importing the module {module} fails with {one_line(error)} ({where.filename} line "
            f"{where.lineno})"
        ) from error
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


# ---- t5's objectives on raw text


def text_task(job: Job, source: seqio.DataSource, vocabulary: Tokenizer) -> seqio.Task:
    """Build t5's span corruption or prefix LM task over the user's text, with the steps of t5's own tasks for C4."""
    from t5.data import preprocessors

    objectives = {
        "span_corruption": functools.partial(
            preprocessors.span_corruption,
            noise_density=job.noise_density,
            mean_noise_span_length=job.mean_noise_span_length,
        ),
        "prefix_lm": preprocessors.prefix_lm,
    }
    feature = seqio.Feature(seqio_vocabulary(vocabulary, Path(job.folder)), add_eos=True)
    return seqio.Task(
        job.task,
        source=source,
        output_features={"inputs": feature, "targets": feature},
        preprocessors=[
            functools.partial(seqio.preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            objectives[job.task],
            seqio.preprocessors.append_eos_after_trim,
        ],
    )


def seqio_vocabulary(vocabulary: Tokenizer, folder: Path) -> seqio.SentencePieceVocabulary:
    """Convert a vocabulary to seqio's class. Ids are the same, and text cannot contain sentinel tokens.

    Raises:
        UserError: the padding id is not 0, or the sentinels are not the last ids. t5 requires both.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(Path(vocabulary.path).read_bytes())
    if len(model.pieces) < vocabulary.size:
        for index in reversed(range(vocabulary.num_sentinels)):
            model.pieces.add(piece=sentinel_piece(index), type=_UNUSED)
    else:
        for index in vocabulary.sentinel_ids.tolist():
            model.pieces[index].type = _UNUSED
    path = folder / "seqio_vocabulary.model"
    write_atomic(path, model.SerializeToString())  # other ranks write the same
    theirs = seqio.SentencePieceVocabulary(str(path))
    at_the_end = np.array_equal(vocabulary.sentinel_ids, vocabulary.size - 1 - np.arange(vocabulary.num_sentinels))
    if vocabulary.pad_id != 0 or theirs.eos_id != vocabulary.eos_id or not at_the_end:
        raise UserError(
            f"t5 needs padding id 0 and sentinels at the end, unlike vocabulary {vocabulary.path}: train one with "
            "`lmtools vocab`, or choose --data_pipeline native"
        )
    return theirs


class TextSource:
    """The documents of the user's raw text as a seqio data source.

    Attributes:
        failure: the error that stopped the reading of the text; None if there was none.
    """

    def __init__(self, job: Job, log: Log) -> None:
        self._job, self._log = job, log
        self.shards = plan_shards(job.data_path, document_per_line=job.document_per_line)
        self._rejected = RejectedRecords(job.max_bad_lines, job.rejected_path)
        self._seen: set[str] = set()  # each epoch reads them again
        self._lock = threading.Lock()  # shards are read in several threads
        self.failure: UserError | None = None

    def no_documents(self) -> UserError:
        return no_documents(self._job.data_path, self._rejected)

    def source(self) -> seqio.FileDataSource:
        """Build the seqio data source. A small text is kept in memory, since TensorFlow is slow to start an epoch."""
        files = {"train": [str(k) for k in range(len(self.shards))]}
        size = sum(shard.num_bytes * (_COMPRESSION if shard.end is None else 1) for shard in self.shards)
        if size > _SMALL_TEXT or any(shard.kind == "dataset" for shard in self.shards):
            return seqio.FileDataSource(self._read_file, files)
        texts = [[item["text"] for item in self._documents(number)] for number in range(len(self.shards))]
        texts_of_shards = tf.ragged.constant(texts, tf.string, ragged_rank=1)
        epochs = -(-_SMALL_TEXT // size) if len(texts) == 1 else 1

        def read_shard_in_memory(number: tf.Tensor) -> tf.data.Dataset:
            texts = texts_of_shards[tf.strings.to_number(number, tf.int32)]
            return tf.data.Dataset.from_tensor_slices({"text": texts}).repeat(epochs)

        return seqio.FileDataSource(read_shard_in_memory, files)

    def _read_file(self, number: tf.Tensor) -> tf.data.Dataset:
        signature = {"text": tf.TensorSpec([], tf.string)}
        return tf.data.Dataset.from_generator(self._documents, args=(number,), output_signature=signature)

    def _documents(self, number: bytes | int) -> Iterator[dict[str, str]]:
        shard = self.shards[int(number)]
        try:
            for item in read_shard(shard, self._job.text_key):
                if isinstance(item, Record):
                    yield {"text": item.value}
                elif not item.is_empty:
                    self._reject(shard, item)
        except UserError as error:  # would reach the reader as an error of TensorFlow's
            self.failure = error
            raise

    def _reject(self, shard: Shard, rejected: Rejected) -> None:
        rejected = rejected._replace(line=lines_before(shard) + rejected.line)
        with self._lock:
            if rejected.where in self._seen:
                return
            self._seen.add(rejected.where)
            self._rejected.reject(rejected)
            if str(len(self._seen)).strip("0") == "1":  # the first, the tenth, the hundredth ...
                self._log(logging.WARNING, str(self._rejected))


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
