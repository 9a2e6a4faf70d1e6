"""Training while the text is being read and tokenized: `--streaming`.

The text is divided into V streams, which are endless sequences of documents. A chunk is some consecutive documents of
a stream. A worker is a training process.

    text -> V streams of documents -> chunks of tokens -> examples -> batches of this worker
            (text.py)                 (worker.py)         (chunks.py)

Sample g is example g // V of stream g % V. Examples are shuffled within their chunk. The order depends only on the
seed. Worker r of W reads every n-th stream, beginning with stream r % n, where n is the greatest common divisor of W
and V. If W divides V, no two workers read the same document. Two workers and four streams:

    g          0  1  2  3  4  5  6  7
    stream     0  1  2  3  0  1  2  3
    worker     0  1  0  1  0  1  0  1

Each stream has its own epochs. Several texts are mixed document by document within each stream. The last example of a
chunk is short and padded. `datasets.IterableDataset` is not used because its order depends on the number of workers
and its state does not restore the shuffle buffer (benchmarks/log.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.data.buckets import BucketedDataset
from lm_experiments_tools.data.loader import SampleDataset, TrainLoader
from lm_experiments_tools.data.objectives.dataset import ObjectiveDataset
from lm_experiments_tools.data.objectives.registry import build_objective, grouped_by_length, mixed_rows
from lm_experiments_tools.data.objectives.token_stream import TokensInMemory
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.streaming.chunks import ChunkFeed, ExampleStream
from lm_experiments_tools.data.streaming.text import MixedPlan
from lm_experiments_tools.data.streaming.worker import Chunk, ChunkSettings
from lm_experiments_tools.data.text.vocabulary import Vocabulary, warn_of_unknown
from lm_experiments_tools.data.tokens.encoding import TextEncoder
from lm_experiments_tools.data.tokens.files import token_prefix
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import RunError, UserError, os_sentence
from lm_experiments_tools.files import json_sha256

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs
    from lm_experiments_tools.data.objectives.objective import Objective

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "streams"  # below the working directory
_VERSION = 4  # of the mapping (text, settings, seed) -> samples; part of the fingerprint
_WORKERS = 4  # processes, unless --data_n_workers says otherwise: they wait for the network more than they work
_ROWS_AT_ONCE = 64  # of each stream: numpy's calls cost as much for one row


class StreamedDataset:
    """Training samples of `--streaming`, by sample number: those of the streams that this worker reads.

    A stream is an endless sequence of documents, a fixed part of the text.

    Args:
        feed: tokenizes the text of the streams.
        fingerprint: hash of text, settings and seed.
        num_streams: number of streams over all workers.
        buckets: by stream number, the examples grouped by length; empty if all have the same length.
    """

    def __init__(
        self, feed: ChunkFeed, fingerprint: str, num_streams: int, buckets: Mapping[int, BucketedDataset]
    ) -> None:
        self.feed, self.fingerprint, self.num_streams, self._buckets = feed, fingerprint, num_streams, buckets

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the samples with the given numbers int64[n]. Waits until their text is tokenized."""
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
    """Training batches of a `StreamedDataset`, made from text that is tokenized during the run.

    Raises RunError if the text cannot be read or a worker process dies.
    """

    samples_per_epoch = None

    def _next_batch(self) -> dict[str, np.ndarray]:
        try:
            return super()._next_batch()
        except OSError as error:
            raise RunError(f"the streamed text stopped: {os_sentence(error)}") from error

    def _how_many_at_once(self, batch: dict[str, np.ndarray]) -> int:
        return max(1, _ROWS_AT_ONCE * len(self.dataset.feed.streams) // self.rows_per_worker)

    def close(self) -> None:
        """End the worker processes that tokenize the text."""
        self.dataset.feed.close()


def streaming_data(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Vocabulary, model_kind: ModelKind
) -> tuple[StreamLoader, str]:
    """Build the data loader of `--streaming` and its description for the log.

    All ranks (training processes) must call this function. It reads and tokenizes the first text.

    Raises:
        UserError: an input is missing, unreadable or empty, or the objective refuses the settings.
    """
    plan, fingerprint = on_main(backend, lambda: _plan(args, vocabulary, backend.world_size))
    streams = streams_of(backend.rank, backend.world_size, plan.num_streams)
    if backend.is_main and plan.num_streams % backend.world_size:
        logger.info(
            "%d workers do not divide %d streams, so several of them read the same text (see --streams)",
            backend.world_size,
            plan.num_streams,
        )
    objective = build_objective(args, vocabulary, model_kind)
    loader = on_all(backend, lambda: _open(args, vocabulary, objective, backend, plan, fingerprint, streams))
    return loader, f"{objective.describe()}; from a stream: {', '.join(args.data_path)}, {plan.describe()}"


def streams_of(rank: int, world_size: int, num_streams: int) -> range:
    """Return the numbers of the text streams that a worker reads.

    Args:
        rank, world_size: number of the worker, from 0, and number of workers.
        num_streams: number of streams over all workers.
    """
    step = gcd(world_size, num_streams)
    return range(rank % step, num_streams, step)


def _plan(args: T5PretrainingArgs, vocabulary: Vocabulary, world_size: int) -> tuple[MixedPlan, str]:
    """The text and the fingerprint of data, objective and seed."""
    for path in args.data_path:
        if token_prefix(path) is not None:
            raise UserError(f"--data_path {path} is tokenized already: leave out --streaming, which tokenizes text")
    text, per_line = (args.data_path, args.streams, args.seed), {"document_per_line": args.document_per_line}
    if args.is_weighted():
        plan = MixedPlan.make(*text, **args.mixing(), **per_line)
    else:
        plan = MixedPlan.of_one(*text, **per_line)
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
        arrangement = f"/bucket_rows={rows}" if rows else f"/mix_rows={mixed_rows(args, world_size)}"
    return plan, json_sha256(parts) + arrangement


def _open(
    args: T5PretrainingArgs,
    vocabulary: Vocabulary,
    objective: Objective,
    backend: Backend,
    plan: MixedPlan,
    fingerprint: str,
    streams: range,
) -> StreamLoader:
    """Start the workers and wait for the first examples, to find most errors here."""
    folder = (CACHE / fingerprint[:16]).absolute()
    folder.mkdir(parents=True, exist_ok=True)

    def build(chunk: Chunk, stream: int, number: int) -> SampleDataset:
        seed = stream_key(args.seed, f"stream {stream}, chunk {number}")
        if number == 0:
            num_unknown = np.count_nonzero(chunk.tokens == vocabulary.unk_id)
            warn_of_unknown(num_unknown, len(chunk.tokens), f"stream {stream}")
        return ObjectiveDataset(TokensInMemory(chunk.tokens), objective, seed)

    encoder = TextEncoder.of(vocabulary, args.text_key, args.ends_documents())
    settings = ChunkSettings(plan.on_this_machine(), str(folder), encoder, args.max_bad_lines)
    num_workers = args.data_n_workers or min(_WORKERS, available_cores())
    feed = ChunkFeed([ExampleStream(folder, number) for number in streams], settings, build, num_workers)
    buckets = {}
    if args.objective().varies_in_length:
        for number, stream in feed.streams.items():
            buckets[number] = grouped_by_length(args, stream, backend.world_size, number, plan.num_streams)
    dataset = StreamedDataset(feed, fingerprint, plan.num_streams, buckets)
    unread = {number: (0, 0) for number, stream in feed.streams.items() if not stream.num_known}
    if unread:
        try:
            feed.wait_for(unread)
        except (UserError, OSError):
            feed.close()
            raise
    return StreamLoader(dataset, args.rows_on_worker(backend.world_size), backend.rank, backend.world_size)
