"""Training while the text is being read and tokenized: `--streaming`.

    text -> V streams of documents -> chunks of tokens -> examples -> batches of this worker
            (text.py)                 (worker.py)         (chunks.py)

Global sample g is example g // V of stream g % V, shuffled within its chunk: the order depends on the seed alone, not
on the number of workers or the speed of the source. Worker r of W needs the streams v with v = r modulo the greatest
common divisor of W and V; where W divides V no two workers read the same document. Two workers and four streams:

    g          0  1  2  3  4  5  6  7
    stream     0  1  2  3  0  1  2  3
    worker     0  1  0  1  0  1  0  1

Each stream starts its next epoch when its text is read, so there is no common epoch. Several texts are mixed document
by document within each stream. The last example of a chunk is short and padded; the next chunk begins with
the next document. `datasets.IterableDataset` is not used: its order depends on the number of workers, and its state
restores no shuffle buffer (benchmarks/log.md).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.data.buckets import BucketedDataset, MixedSteps
from lm_experiments_tools.data.loader import SampleDataset, TrainLoader
from lm_experiments_tools.data.objectives.registry import ObjectiveContext, example_dataset
from lm_experiments_tools.data.objectives.token_stream import TokensInMemory
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.streaming.chunks import ChunkFeed, ExampleStream
from lm_experiments_tools.data.streaming.text import MixedPlan, StreamPlan
from lm_experiments_tools.data.streaming.worker import Chunk, ChunkSettings
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.files import token_prefix
from lm_experiments_tools.data.tokens.tokenize import TextEncoder
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import RunError, UserError, os_sentence

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "streams"  # below the working directory
_VERSION = 2  # of the mapping (text, settings, seed) -> samples; part of the fingerprint
_WORKERS = 4  # processes, unless --data_n_workers says otherwise: they wait for the network more than they work
_ROWS_AT_ONCE = 64  # of each stream: numpy's calls cost as much for one row


class StreamedExamples:
    """The examples of one stream as an endless dataset, for length grouping."""

    def __init__(self, stream: ExampleStream) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return 1 << 62

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """int64[2, n]: tokens of inputs and targets."""
        lengths = np.empty((2, len(samples)), np.int64)
        for here, dataset, numbers in self.stream.locate(samples):
            lengths[:, here] = dataset.lengths(numbers)
        return lengths


Arrange = Callable[[StreamedExamples, int], BucketedDataset]


class StreamedDataset:
    """Samples by global number, of the streams that this worker reads.

    Args:
        feed: its chunks.
        arrange: (examples of a stream, its number) -> the examples grouped by length, in the same way for all streams;
            None where all examples are of one length.
    """

    def __init__(self, feed: ChunkFeed, fingerprint: str, num_streams: int, arrange: Arrange | None) -> None:
        self.feed, self.fingerprint, self.num_streams = feed, fingerprint, num_streams
        self._buckets = {
            number: arrange(StreamedExamples(stream), number)
            for number, stream in (feed.streams.items() if arrange else ())
        }

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of global samples int64[n] of this worker's streams, each [n, length]; waits until they are ready."""
        streams, numbers = samples % self.num_streams, samples // self.num_streams
        wanted = {}
        for stream in np.unique(streams).tolist():
            here = numbers[streams == stream]
            wanted[stream] = self._range(stream, int(here.min()), int(here.max()))
        self.feed.wait_for(wanted)
        batch: dict[str, np.ndarray] = {}
        for stream in wanted:
            rows = np.flatnonzero(streams == stream)
            places = numbers[rows]
            if stream in self._buckets:
                places = self._buckets[stream].arranged(places)
            for here, dataset, indices in self.feed.streams[stream].locate(places):
                for name, values in dataset.batch(indices).items():
                    if name not in batch:
                        batch[name] = np.empty((len(samples), *values.shape[1:]), values.dtype)
                    batch[name][rows[here]] = values
        return batch

    def _range(self, stream: int, low: int, high: int) -> tuple[int, int]:
        """Examples needed for those from `low` to `high`: with buckets, whole windows."""
        if stream not in self._buckets:
            return low, high
        window = self._buckets[stream].window
        return low // window * window, (high // window + 1) * window - 1


class StreamLoader(TrainLoader):
    """Batches of a `StreamedDataset`. Raises RunError for a source that cannot be read, a full disk, a lost worker."""

    samples_per_epoch = None

    def _next_batch(self) -> dict[str, np.ndarray]:
        try:
            return super()._next_batch()
        except OSError as error:
            raise RunError(f"the streamed text stopped: {os_sentence(error)}") from error

    def _how_many_at_once(self, batch: dict[str, np.ndarray]) -> int:
        return max(1, _ROWS_AT_ONCE * len(self.dataset.feed.streams) // self.rows_per_worker)

    def close(self) -> None:
        """End the worker processes."""
        self.dataset.feed.close()


def streaming_data(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Vocabulary, model_kind: ModelKind
) -> tuple[StreamLoader, str]:
    """The loader of `--streaming` and its description. Collective; the first text is read and tokenized here.

    Raises:
        UserError: an input that does not exist, cannot be read or is empty, or settings that the objective refuses.
    """
    plan, fingerprint = on_main(backend, lambda: _plan(args, vocabulary, backend.world_size), takes_long=True)
    streams = streams_of(backend.rank, backend.world_size, plan.num_streams)
    if backend.is_main and plan.num_streams % backend.world_size:
        logger.info(
            "%d workers do not divide %d streams, so several of them read the same text (see --streams)",
            backend.world_size,
            plan.num_streams,
        )
    context = ObjectiveContext(args, vocabulary, model_kind, args.seed)
    loader = on_all(backend, lambda: _open(context, backend, plan, fingerprint, streams), takes_long=True)
    return loader, f"{args.task} from a stream: {', '.join(args.data_path)}, {plan.describe()}"


def streams_of(rank: int, world_size: int, num_streams: int) -> range:
    """Numbers of the streams that one worker reads."""
    step = gcd(world_size, num_streams)
    return range(rank % step, num_streams, step)


def _plan(args: T5PretrainingArgs, vocabulary: Vocabulary, world_size: int) -> tuple[StreamPlan | MixedPlan, str]:
    """The text and the fingerprint of data, objective and seed."""
    for path in args.data_path:
        if token_prefix(path) is not None:
            raise UserError(f"--data_path {path} is tokenized already: leave out --streaming, which tokenizes text")
    plan: StreamPlan | MixedPlan
    if args.is_weighted():
        plan = MixedPlan.make(args.data_path, args.streams, args.seed, **args.mixing())
    else:
        plan = StreamPlan.make(args.data_path, args.streams, args.seed)
    parts = {
        "version": _VERSION,
        "text": plan.identity(),
        "text_key": args.text_key,
        "vocabulary": vocabulary.identity,
        "encode_by": vocabulary.encode_by,
        "append_eos": args.ends_documents(),
        "objective": args.settings_of_examples(),
        "streams": plan.num_streams,
        "seed": args.seed,
    }
    arrangement = ""
    if args.objective().varies_in_length:
        rows = args.bucket_rows
        arrangement = f"/bucket_rows={rows}" if rows else f"/mix_rows={_mixed_rows(args, world_size)}"
    return plan, hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest() + arrangement


def _mixed_rows(args: T5PretrainingArgs, world_size: int) -> int:
    return args.mix_rows or args.global_batch_size(world_size)


def _arrangement(args: T5PretrainingArgs, num_streams: int, world_size: int) -> Arrange | None:
    """Rows of all streams together are those of a bucket, or of a step that is mixed."""
    if not args.objective().varies_in_length:
        return None
    if args.bucket_rows:
        rows = -(-args.bucket_rows // num_streams)
        return lambda examples, stream: BucketedDataset(examples, rows, args.seed)
    mixed = _mixed_rows(args, world_size)
    return lambda examples, stream: MixedSteps(examples, mixed, args.seed, stream=stream, num_streams=num_streams)


def _open(
    context: ObjectiveContext, backend: Backend, plan: StreamPlan | MixedPlan, fingerprint: str, streams: range
) -> StreamLoader:
    """Start the workers and wait for the first examples, to find most errors here."""
    args, vocabulary = context.args, context.vocabulary
    folder = (CACHE / fingerprint[:16]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    first = threading.Lock()  # the first chunk to take it logs the lengths, which are the same for all

    def build(chunk: Chunk, stream: int, number: int) -> SampleDataset:
        seed = stream_key(args.seed, f"stream {stream}, chunk {number}")
        quiet = not first.acquire(blocking=False)
        return example_dataset(replace(context, seed=seed, quiet=quiet), TokensInMemory(chunk.tokens))

    encoder = TextEncoder.of(vocabulary, args.text_key, args.ends_documents())
    settings = ChunkSettings(plan.on_this_machine(), str(folder), encoder, args.max_bad_lines)
    num_workers = args.data_n_workers or min(_WORKERS, available_cores())
    feed = ChunkFeed([ExampleStream(folder, number) for number in streams], settings, build, num_workers)
    arrange = _arrangement(args, plan.num_streams, backend.world_size)
    dataset = StreamedDataset(feed, fingerprint, plan.num_streams, arrange)
    unread = {number: (0, 0) for number, stream in feed.streams.items() if not stream.num_known}
    if unread:
        try:
            feed.wait_for(unread)
        except (UserError, OSError):
            feed.close()
            raise
    return StreamLoader(dataset, args.rows_per_worker() * backend.shares, backend.rank, backend.world_size)
