"""Training while the text is being read and tokenized: `--streaming`.

A text is divided into V streams, which are endless sequences of documents. A chunk is some consecutive documents of a
stream. A worker is a training process.

    text -> V streams of documents -> chunks of tokens -> examples -> batches of this worker
            (text.py)                 (worker.py)         (chunks.py)

Sample g is sample g // V of stream g % V. Examples are shuffled within their chunk. The
order depends only on the seed. Worker r of W reads every n-th stream, beginning with stream r % n, where n is the
greatest common divisor of W and V. If W divides V, no two workers read the same document. Two workers and four
streams:

    g          0  1  2  3  4  5  6  7
    stream     0  1  2  3  0  1  2  3
    worker     0  1  0  1  0  1  0  1

Each stream has its own epochs. Several texts are mixed example by example within each stream (`Mixture`). The last
example of a chunk is short and padded. `datasets.IterableDataset` is not used because its order depends on the number
of workers and its state does not restore the shuffle buffer (benchmarks/log.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.backends.collective import on_all, on_main
from lm_experiments_tools.data.dataset import Dataset, SampleDataset, joined
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.mixture import Mixture, mixing_rates
from lm_experiments_tools.data.objectives.objective import build_objective
from lm_experiments_tools.data.objectives.token_rows import TokenRows, TokensInMemory, arranged_by_length, mixed_rows
from lm_experiments_tools.data.order import stream_key
from lm_experiments_tools.data.streaming.chunks import ChunkFeed, ExampleStream
from lm_experiments_tools.data.streaming.text import StreamPlan
from lm_experiments_tools.data.streaming.worker import Chunk, ChunkRequest, ChunkSettings
from lm_experiments_tools.data.text.sources import content_of
from lm_experiments_tools.data.text.tokenizer import Tokenizer, warn_of_unknown
from lm_experiments_tools.data.tokens.indexed import token_prefix
from lm_experiments_tools.data.tokens.tokenize import TextEncoder
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
_VERSION = 5  # of the mapping (text, settings, seed) -> samples; part of the fingerprint
_WORKERS = 4  # processes, unless --data_n_workers says otherwise: they wait for the network more than they work
_ROWS_AT_ONCE = 64  # of each stream: numpy's calls cost as much for one row
_PERIOD = 1 << 16  # samples of a stream after which the order of the texts in a mixture repeats


class StreamedDataset(SampleDataset):
    """Training samples of `--streaming`, by sample number: those of the streams that this worker reads.

    A stream is an endless sequence of documents, a fixed part of the text.

    Args:
        feed: tokenizes the text of the streams.
        fingerprint: hash of text, settings and seed.
        num_streams: number of streams over all workers.
        mixture: which text each sample of a stream comes from; None for one text.
    """

    samples_per_epoch = None

    def __init__(self, feed: ChunkFeed, fingerprint: str, num_streams: int, mixture: Mixture | None = None) -> None:
        self.feed, self.fingerprint, self.num_streams, self.mixture = feed, fingerprint, num_streams, mixture
        self.rows_at_once = _ROWS_AT_ONCE * len(feed.streams)

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the samples with the given numbers int64[n]. Waits until their text is tokenized.

        Raises:
            RunError: the text cannot be read, or a worker process has died.
        """
        streams, numbers = samples % self.num_streams, samples // self.num_streams
        texts = np.zeros_like(samples)
        if self.mixture is not None:
            texts, numbers = self.mixture.locate(numbers)
        rows_of = {
            (text, stream): np.flatnonzero((texts == text) & (streams == stream))
            for text, stream in np.unique(np.stack([texts, streams]), axis=1).T.tolist()
        }
        try:
            self.feed.wait_for({
                where: (int(numbers[rows].min()), int(numbers[rows].max())) for where, rows in rows_of.items()
            })  # fmt: skip
        except OSError as error:
            raise RunError(f"the streamed text stopped: {os_sentence(error)}") from error
        parts = (
            (rows[here], dataset.batch(indices))
            for where, rows in rows_of.items()
            for here, dataset, indices in self.feed.streams[where].locate(numbers[rows])
        )
        return joined(parts, len(samples), "examples of --task")

    def close(self) -> None:
        """End the worker processes that tokenize the text."""
        self.feed.close()


def streaming_data(
    args: T5PretrainingArgs, backend: Backend, vocabulary: Tokenizer, model_kind: ModelKind
) -> tuple[TrainLoader, str]:
    """Build the data loader of `--streaming` and its description for the log.

    All ranks (training processes) must call this function. It reads and tokenizes the first text.

    Raises:
        UserError: an input is missing, unreadable or empty, or the objective refuses the settings.
    """
    plans, shares, fingerprint = on_main(backend, lambda: _plan(args, vocabulary, backend.world_size))
    num_streams = plans[0].num_streams
    if backend.is_main and num_streams % backend.world_size:
        logger.warning(
            "the text can be divided into %d streams of equal size, which %d workers do not divide, so several read "
            "the same text: tokenize it before (lmtools tokenize), or give more or smaller files, or --streams",
            num_streams,
            backend.world_size,
        )
    objective = build_objective(args, vocabulary, model_kind)
    loader = on_all(backend, lambda: _open(args, vocabulary, objective, backend, plans, shares, fingerprint))
    described = f"{sum(len(plan.shards) for plan in plans)} shards in {num_streams} streams"
    if len(plans) > 1:
        described += f", examples {' : '.join(f'{share:.2%}' for share in shares)}"
    return loader, f"{objective.describe()}; from a stream: {', '.join(args.data_path)}, {described}"


def streams_of(rank: int, world_size: int, num_streams: int) -> range:
    """Return the numbers of the text streams that a worker reads.

    Args:
        rank, world_size: number of the worker, from 0, and number of workers.
        num_streams: number of streams over all workers.
    """
    step = gcd(world_size, num_streams)
    return range(rank % step, num_streams, step)


def _plan(
    args: T5PretrainingArgs, vocabulary: Tokenizer, world_size: int
) -> tuple[list[StreamPlan], list[float], str]:
    """The texts in equally many streams, their shares, and the fingerprint of data, objective and seed."""
    for path in args.data_path:
        if token_prefix(path) is not None:
            raise UserError(f"--data_path {path} is tokenized already: leave out --streaming, which tokenizes text")
    texts = [(path,) for path in args.data_path] if args.is_weighted() else [args.data_path]
    plans = [
        StreamPlan.make(text, args.streams, stream_key(args.seed, f"text {number}"), args.document_per_line)
        for number, text in enumerate(texts)
    ]
    num_streams = min(plan.num_streams for plan in plans)
    num_streams = next(n for n in range(num_streams, 0, -1) if all(plan.is_balanced(n) for plan in plans))
    plans = [replace(plan, num_streams=num_streams) for plan in plans]
    parts = {
        "version": _VERSION,
        "text": [content_of(plan.shards) for plan in plans],
        "mixing": (shares := _shares(args, plans)),
        "text_key": args.text_key,
        "vocabulary": vocabulary.fingerprint,
        "encode_by": vocabulary.encode_by,
        "append_eos": args.ends_documents(),
        "objective": args.settings_of_examples(),
        "streams": num_streams,
        "seed": args.seed,
    }
    order = f"/mix_rows={mixed_rows(args, world_size)}" if args.objective().varies_in_length else ""
    return plans, shares, json_sha256(parts) + order


def _shares(args: T5PretrainingArgs, plans: Sequence[StreamPlan]) -> list[float]:
    """Fraction of the examples that come from each text. The size of a text is that of its files in bytes."""
    rates = np.ones(1) if len(plans) == 1 else _rates(args, plans)
    shares = rates / rates.sum()
    if shares.min() < 1 / _PERIOD:
        path = args.data_path[int(shares.argmin())]
        raise UserError(f"{path} would be 1 of {1 / shares.min():,.0f} examples: leave it out, or give it more weight")
    return shares.tolist()


def _rates(args: T5PretrainingArgs, plans: Sequence[StreamPlan]) -> np.ndarray:
    """Relative numbers of examples of several texts."""
    mixing = args.mixing()
    weights = np.array(mixing["weights"] or [1.0] * len(plans), np.float64)
    if mixing["blending"] == "megatron":
        return weights
    kinds = {(shard.kind == "dataset", shard.end is None) for plan in plans for shard in plan.shards}
    if len(kinds) > 1 or (True, True) in kinds:
        raise UserError(
            f"the sizes of {', '.join(args.data_path)} do not compare (unknown for datasets, and only some files are "
            "compressed): give the shares by --data_blending megatron and --data_weights"
        )
    sizes = [sum(shard.num_bytes for shard in plan.shards) for plan in plans]
    return mixing_rates(sizes, weights, mixing["maximum"], mixing["temperature"])


def _open(
    args: T5PretrainingArgs,
    vocabulary: Tokenizer,
    objective: Objective,
    backend: Backend,
    plans: Sequence[StreamPlan],
    shares: Sequence[float],
    fingerprint: str,
) -> TrainLoader:
    """Start the workers and wait for the first examples, to find most errors here."""
    folder = (CACHE / fingerprint[:16]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    num_streams, world_size = plans[0].num_streams, backend.world_size

    def build(chunk: Chunk, request: ChunkRequest) -> Dataset:
        where = f"text {request.text}, stream {request.stream}, chunk {request.number}"
        if request.number == 0:
            num_unknown = np.count_nonzero(chunk.tokens == vocabulary.unk_id)
            warn_of_unknown(num_unknown, len(chunk.tokens), f"stream {request.stream}")
        dataset = Dataset(TokenRows(TokensInMemory(chunk.tokens), objective, stream_key(args.seed, where)))
        # A step takes this text's share of the rows of each stream.
        rows = mixed_rows(args, world_size) / num_streams * shares[request.text]
        return arranged_by_length(args, dataset, rows, request.num_before)

    encoder = TextEncoder.of(vocabulary, args.text_key, args.ends_documents())
    own_plans = tuple(plan.on_this_machine() for plan in plans)
    settings = ChunkSettings(own_plans, str(folder), encoder, args.max_bad_lines)
    streams = streams_of(backend.rank, world_size, num_streams)
    examples = [ExampleStream(folder, text, number) for text in range(len(plans)) for number in streams]
    feed = ChunkFeed(examples, settings, build, args.data_n_workers or min(_WORKERS, available_cores()))
    mixture = None
    if len(plans) > 1:
        mixture = Mixture([_PERIOD // len(plans)] * len(plans), shares, "megatron")
    unread = {where: (0, 0) for where, stream in feed.streams.items() if not stream.num_known}
    if unread:
        try:
            feed.wait_for(unread)
        except (UserError, OSError):
            feed.close()
            raise
    dataset = StreamedDataset(feed, fingerprint, num_streams, mixture)
    return TrainLoader(dataset, args.rows_on_worker(world_size), backend.rank, world_size)
