"""The tokenization pipeline: several processes encode shards (parts) of a text, and the results are joined in order.

    text -> shards (sources.py) -> encode_shard (encoding.py) -> PREFIX.shards/000000.bin, ... -> PREFIX.bin, .idx

The output has the same bytes for any number of shards and processes. An interrupted run resumes from the finished
shards in PREFIX.shards/. In a job array, job i of n encodes the i-th of n groups of consecutive shards, and merge.py
joins the outputs.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.records import Rejected, RejectedRecords, count_lines
from lm_experiments_tools.data.text.sources import Shard, content_of, datasets_of, plan_shards
from lm_experiments_tools.data.tokens.encoding import EncodedWriter, Encoder, encode_shard, work
from lm_experiments_tools.data.tokens.files import dataset_exists, read_meta, remove_unfinished
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.workers import WorkerEnded, WorkerPool
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256, read_json, write_atomic

logger = logging.getLogger(__name__)

FORMAT = 2  # raise when the ids of the same text would change: shards and caches of another format are not reused
_SHARDS_PER_PART = 4  # at least, so that the parts of a job array are of about equal size
_MIN_SHARD_BYTES = 1 << 16


def _encode_shards(
    jobs: Sequence[tuple[Shard, str]], encoder: Encoder, workers: int, limit: int | None, remedy: str
) -> Iterator[tuple[Shard, str]]:
    """The (shard, prefix) of each finished job; ends early where too many records are rejected."""
    num_rejected, workers = 0, min(workers, len(jobs))
    with ExitStack() as stack:
        if workers <= 1:
            answers = ((job, encode_shard(*job, encoder, limit)) for job in jobs)
        else:
            pool = stack.enter_context(WorkerPool(work, (encoder, limit), workers))
            submitted = {pool.submit(job): job for job in jobs}
            answers = ((submitted[done], done.result()) for done in as_completed(submitted))
        try:
            for job, (count, finished) in answers:
                num_rejected += count
                if not finished or (limit is not None and num_rejected > limit):
                    return
                yield job
        except WorkerEnded as end:
            raise UserError(
                f"a tokenization process ended with exit code {end.returncode} (-9: killed, often for lack of memory) "
                f"at {end.request[0].path}: {remedy}"
            ) from None


# ---- a run ----


@dataclass(frozen=True)
class Tokenization:
    """One tokenization of a text by several processes. It can be resumed after an interruption.

    Attributes:
        shards: the parts of the text, which are encoded independently.
        encoder: converts records to token ids.
        prefix: path of the folder for finished shards, without its ending ".shards/". The caller must hold its lock.
        outputs: prefixes of the token files, one per suffix of the encoder.
        rejected: path of the list of rejected records.
        limit: maximum number of rejected records; None for the default limit.
        workers: number of processes.
        remedy: advice in the error message if a process dies.
    """

    shards: Sequence[Shard]
    encoder: Encoder
    prefix: str
    outputs: Sequence[str]
    rejected: str
    limit: int | None
    workers: int
    remedy: str = "try again with fewer workers"

    def run(
        self,
        meta: Callable[[Sequence[EncodedWriter], RejectedRecords], Sequence[dict[str, Any]]],
        progress: Callable[[Sequence[tuple[Shard, str]], Iterable[tuple[Shard, str]]], None],
    ) -> list[dict[str, Any]]:
        """Encode all shards (parts of the text) that are not finished, then join all shards into the token files.

        Args:
            meta: function that returns the content of each .json file.
            progress: function that shows the progress. It gets the jobs and an iterator over finished jobs, which it
                must consume.

        Returns:
            The contents of the .json files.
        """
        for prefix in self.outputs:
            remove_unfinished(prefix)
        files = _ShardFiles(self.shards, self.prefix, self.encoder)
        with files.removed_unless_resumable():
            jobs = files.jobs()
            with closing(_encode_shards(jobs, self.encoder, self.workers, self.limit, self.remedy)) as done:
                progress(jobs, done)
            files.check_unchanged()
            rejected = files.collect_rejected(self.rejected, self.limit)
            with ExitStack() as stack:
                writers = [stack.enter_context(EncodedWriter(name, self.encoder.dtype)) for name in self.outputs]
                for writer, suffix in zip(writers, self.encoder.suffixes, strict=True):
                    for shard in files.parts(suffix):
                        writer.add_shard(shard)
                metas = list(meta(writers, rejected))
                for writer, content in zip(writers, metas, strict=True):
                    writer.finalize(content)
            files.remove()
        return metas


class _ShardFiles:
    """PREFIX.shards/ with the token files of shards."""

    def __init__(self, shards: Sequence[Shard], prefix: str, encoder: Encoder):
        self.shards, self._encoder = shards, encoder
        self._folder, self._fingerprint = Path(f"{prefix}.shards"), plan_fingerprint(shards, encoder.identity)

    def parts(self, suffix: str) -> Iterator[IndexedDataset]:
        """The finished token files of a suffix, in order."""
        return (IndexedDataset(self._prefix(number) + suffix) for number in range(len(self.shards)))

    def jobs(self) -> list[tuple[Shard, str]]:
        """Return the shards that are still to be encoded, each with the path prefix of its token files."""
        left = [number for number in range(len(self.shards)) if not self._is_intact(number)]
        if len(left) < len(self.shards):
            finished = len(self.shards) - len(left)
            logger.info("%d of %d shards are there from an earlier run", finished, len(self.shards))
        return [(self.shards[number], self._prefix(number)) for number in left]

    def _is_intact(self, number: int) -> bool:
        """True for a finished shard with the recorded content: shards are not fsynced, a power cut may damage them."""
        try:
            return all(IndexedDataset(name).check_content() for name in self._names(number))
        except UserError:
            return False

    def _record(self, number: int) -> dict[str, Any] | None:
        """The .json of a finished shard (of the first suffix); None where it is not finished."""
        names = self._names(number)
        with suppress(UserError):  # damaged
            return read_meta(names[0]) or None if all(map(dataset_exists, names)) else None
        return None

    def _names(self, number: int) -> list[str]:
        """The prefixes of a shard's token files."""
        return [self._prefix(number) + suffix for suffix in self._encoder.suffixes]

    def _prefix(self, number: int) -> str:
        return str(self._folder / f"{number:06d}")

    @contextmanager
    def removed_unless_resumable(self) -> Iterator[None]:
        """The folder; it outlives an exception if it holds documents of finished shards."""
        self._prepare()
        try:
            yield
        finally:
            records = map(self._record, range(len(self.shards)))
            if self._folder.exists() and any(record and record["num_documents"] for record in records):
                logger.info("another run resumes from the finished shards in %s", self._folder)
            elif self._folder.exists():
                self.remove()

    def _prepare(self) -> None:
        plan = self._folder / "plan.json"
        with suppress(UserError):  # missing or damaged
            if read_json(plan).get("fingerprint") == self._fingerprint:
                return
        unfinished = f".{plan.name}.tmp"  # of a plan whose writing was killed
        if not plan.is_file() and any(not p.name.startswith(unfinished) for p in self._folder.glob("*")):
            raise UserError(f"{self._folder} holds other files (no plan.json): move it or choose another output")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        write_atomic(plan, json.dumps({"fingerprint": self._fingerprint}))

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder)

    def check_unchanged(self) -> None:
        """Refuse to join shards of a text that has changed since it was planned."""
        for shard in {shard.path: shard for shard in self.shards}.values():
            shard.check_unchanged()
        if datasets_of(self.shards) and plan_fingerprint(self.shards, self._encoder.identity) != self._fingerprint:
            raise UserError("files of the datasets were changed while they were being read: start again")

    def collect_rejected(self, path: str, limit: int | None) -> RejectedRecords:
        """The rejected records of all shards, with the lines of their files, listed in `path`."""
        rejected = RejectedRecords(limit, path)
        file, position, lines = "", 0, 0
        with closing(rejected):
            for number, shard in enumerate(self.shards):
                record, listed = self._record(number), Path(f"{self._prefix(number)}.bad.jsonl")
                rejected.accept(record["num_lines"] if record else 0)
                rejected.num_empty += record["empty_documents"] if record else 0
                if listed.is_file():
                    if shard.path != file:
                        file, position, lines = shard.path, 0, 0
                    if shard.kind != "dataset":
                        lines += count_lines(shard.path, position, shard.start)
                        position = shard.start
                    for entry in map(json.loads, listed.read_text(encoding="utf-8").splitlines()):
                        line = lines + entry["line"]
                        rejected.reject(Rejected(shard.path, line, entry["reason"], entry["content"]))
                if listed.is_file() and record is None:
                    raise UserError(
                        f"most lines of {shard.path} are bad: {rejected}{rejected.remedy or '; give another --input'}"
                    )
        if rejected.count:
            logger.warning("%s", rejected)
        return rejected


# ---- parts of a job array ----


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """Parse the value of the flag `--shard i/n`, which selects part i of n of the text in a job array.

    Returns:
        (i, n), or None if the flag is not given.
    """
    if shard is None:
        return None
    number, slash, count = shard.partition("/")
    if not (number.isdecimal() and slash and count.isdecimal()):
        raise UserError(f"--shard {shard} is not i/n, such as 0/64 for the first of 64 parts")
    return int(number), int(count)


def shard_prefix(prefix: str, number: int, count: int) -> str:
    """Return the output prefix of job `number` of `count`, such as PREFIX-00003-of-00064."""
    return f"{prefix}-{number:05d}-of-{count:05d}"


def part_of_plan(
    inputs: Sequence[str], number: int, count: int, encoding: Any, document_per_line: bool = False
) -> tuple[list[Shard], dict[str, Any]]:
    """Select the part of the text that one job of a job array tokenizes.

    Jobs get consecutive shards (parts of files or datasets) of about equal total size. A job may get none.

    Args:
        inputs: files, folders and datasets.
        number, count: job `number` (from 0) of `count`.
        encoding: identity of the encoder.
        document_per_line: each line of a text file is a document.

    Returns:
        The shards of the job, and the entry "shard" of its .json file, by which `lmtools merge` finds parts of one
        text.
    """
    if count < 1:
        raise UserError(f"--shard {number}/{count} is a part of none: the number after the slash is at least 1")
    if not 0 <= number < count:
        raise UserError(f"--shard {number}/{count} does not exist: the first of {count} is 0/{count}")
    shards = plan_shards(inputs, document_per_line=document_per_line)
    size = sum(shard.num_bytes for shard in shards)
    if len(shards) < _SHARDS_PER_PART * count and size:
        shard_bytes = max(size // (_SHARDS_PER_PART * count), _MIN_SHARD_BYTES)
        shards = plan_shards(inputs, shard_bytes, document_per_line=document_per_line)
    average = max(size // len(shards), 1)  # for shards of a dataset, whose size is not known
    weights = [shard.num_bytes or average for shard in shards]
    total, ends = sum(weights), accumulate(weights)
    part = [
        shard
        for shard, weight, end in zip(shards, weights, ends, strict=True)
        if (2 * end - weight) * count // (2 * total) == number
    ]
    logger.info("part %d of %d: %d of %d shards", number, count, len(part), len(shards))
    return part, {"number": number, "of": count, "source": json_sha256([FORMAT, *content_of(shards), encoding])}


def plan_fingerprint(shards: Sequence[Shard], encoding: Any) -> str:
    """Hash everything that determines the tokens of a text: the input files and the encoder's identity.

    Args:
        shards: the parts of the text.
        encoding: identity of the encoder.
    """
    stamps = {os.path.abspath(shard.path): shard.stamp[1] for shard in shards if shard.stamp is not None}
    parts = [(os.path.abspath(s.path) if s.kind != "dataset" else s.path, s.kind, s.start, s.end) for s in shards]
    datasets = [hf_datasets.identity(name, with_times=True) for name in datasets_of(shards)]
    return json_sha256([FORMAT, parts, sorted(stamps.items()), datasets, encoding])
