"""The pieces of a text, each encoded into token files of its own by one of several processes, to be joined in order.

The pieces (documents.plan_pieces) become small token files in `PREFIX.pieces/`, which goes away when they are joined.
A run that was killed finds its finished pieces again. A document's ids depend on its text alone, so neither the
cutting nor the order of work shows in the result.

A job array does the same over machines: job i of n takes the i-th of n consecutive parts of the pieces, and merge.py
joins what they made to the bytes that one run would have written.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.bad_lines import BadLine, Quarantine
from lm_experiments_tools.data.text.documents import Piece, count_lines, plan_pieces
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, finished_record
from lm_experiments_tools.data.workers import Caller, WorkerEnded, WorkerPool
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import hash_of_ends, read_json, write_atomic

logger = logging.getLogger(__name__)

FORMAT = 1  # raise when the ids of the same text would change: pieces and caches of another format are not reused
_PIECES_PER_SHARD = 4  # at least, so that shards come out of about equal size
_SMALLEST_PIECE = 1 << 16

# (piece, prefix of its token files) -> its number of bad lines, and if it is whole: left unfinished, they are too many
EncodePiece = Callable[[tuple[Piece, str]], tuple[int, bool]]


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """(i, n) of a flag --shard i/n."""
    if shard is None:
        return None
    number, slash, count = shard.partition("/")
    if not (number.isdecimal() and slash and count.isdecimal()):
        raise UserError(f"--shard {shard} is not i/n, such as 0/64 for the first of 64 parts")
    return int(number), int(count)


def shard_prefix(prefix: str, number: int, count: int) -> str:
    """PREFIX-00003-of-00064: where part `number` (from 0) of `count` goes."""
    return f"{prefix}-{number:05d}-of-{count:05d}"


def part_of_plan(inputs: Sequence[str], number: int, count: int, encoding: Any) -> tuple[list[Piece], dict[str, Any]]:
    """The pieces of one of `count` consecutive parts of about equal size, and what its .json records as `shard`.

    Consecutive, so that the parts one after the other are the whole. A part may be empty. `encoding` is what decides
    the ids of a text, as JSON takes it.
    """
    if not count:
        raise UserError(f"--shard {number}/0 is a part of none: the number after the slash is at least 1")
    if not 0 <= number < count:
        raise UserError(
            f"shard {number}/{count} does not exist: the {count} shards are 0/{count} to {count - 1}/{count}"
        )
    pieces = plan_pieces(inputs)
    size = sum(piece.num_bytes for piece in pieces)
    if len(pieces) < _PIECES_PER_SHARD * count and size:
        pieces = plan_pieces(inputs, max(size // (_PIECES_PER_SHARD * count), _SMALLEST_PIECE))
    average = max(size // len(pieces), 1)  # for shards of a dataset, whose size is not known
    weights = [piece.num_bytes or average for piece in pieces]
    total, ends = sum(weights), accumulate(weights)
    own = [
        piece
        for piece, weight, end in zip(pieces, weights, ends, strict=True)
        if (2 * end - weight) * count // (2 * total) == number
    ]
    logger.info("shard %d/%d: %d of %d pieces", number, count, len(own), len(pieces))
    whole = [(os.path.basename(piece.path), piece.kind, piece.start, piece.end, piece.num_bytes) for piece in pieces]
    files = dict.fromkeys(piece.path for piece in pieces if piece.kind != "dataset")
    ends = [hash_of_ends(path) for path in files]  # not their times, which copies on other machines do not share
    identities = [hf_datasets.identity(name, with_ends=True) for name in _datasets_of(pieces)]
    source = hashlib.sha256(json.dumps([FORMAT, whole, ends, identities, encoding]).encode()).hexdigest()
    return own, {"number": number, "of": count, "source": source}


def plan_fingerprint(pieces: Sequence[Piece], encoding: Any) -> str:
    """Changes whenever the tokens could: which bytes are read, and how they are encoded."""
    stamps = {os.path.abspath(piece.path): piece.stamp[1] for piece in pieces if piece.stamp is not None}
    parts = [(os.path.abspath(p.path) if p.kind != "dataset" else p.path, p.kind, p.start, p.end) for p in pieces]
    identities = [hf_datasets.identity(name, with_times=True) for name in _datasets_of(pieces)]
    plan = [FORMAT, parts, sorted(stamps.items()), identities, encoding]
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _datasets_of(pieces: Sequence[Piece]) -> list[str]:
    return list(dict.fromkeys(piece.path for piece in pieces if piece.kind == "dataset"))


class PieceFiles:
    """The pieces of a text, and PREFIX.pieces/ with the token files that they become.

    Args:
        pieces: in the order of the text.
        prefix: of the files that they are joined to. The caller holds a lock on it.
        encoding: what decides the ids of a text, as JSON takes it.
        suffixes: of the token files that one piece becomes. Their .json holds num_documents, num_bytes, bad_lines, and
            num_lines where that is more than documents: the lines that could be used.
    """

    def __init__(self, pieces: Sequence[Piece], prefix: str, encoding: Any, suffixes: Sequence[str] = ("",)):
        self.pieces, self._encoding, self._suffixes = pieces, encoding, suffixes
        self._folder, self._fingerprint = Path(f"{prefix}.pieces"), plan_fingerprint(pieces, encoding)

    def parts(self, suffix: str = "") -> Iterator[IndexedDataset]:
        """The token files of one suffix, all finished, in order."""
        return (IndexedDataset(self._prefix(number) + suffix) for number in range(len(self.pieces)))

    def jobs(self) -> list[tuple[Piece, str]]:
        """(piece, its prefix) of those that no earlier run has finished."""
        left = [number for number in range(len(self.pieces)) if not self._is_intact(number)]
        if len(left) < len(self.pieces):
            finished = len(self.pieces) - len(left)
            logger.info("%d of %d pieces are there from an earlier run", finished, len(self.pieces))
        return [(self.pieces[number], self._prefix(number)) for number in left]

    def _is_intact(self, number: int) -> bool:
        """True for a finished piece with the recorded content; a power cut may damage those not fsynced."""
        if self.record(number) is None:
            return False
        try:
            return all(IndexedDataset(self._prefix(number) + suffix).check_content() for suffix in self._suffixes)
        except UserError:
            return False

    def record(self, number: int) -> dict[str, Any] | None:
        """What a finished piece records of its lines (in the first .json); None where it is not finished."""
        found = [finished_record(self._prefix(number) + suffix, "num_documents") for suffix in self._suffixes]
        return found[0] if all(record is not None for record in found) else None

    def _prefix(self, number: int) -> str:
        return str(self._folder / f"{number:06d}")

    @contextmanager
    def kept_if_resumable(self) -> Iterator[None]:
        """The folder for the time of the work; stays only where that fails and a later run would find something in it.

        Finished pieces of the same plan are kept; where text, vocabulary or options changed they go away.
        """
        self._prepare()
        try:
            yield
        finally:
            records = map(self.record, range(len(self.pieces)))
            if self._folder.exists() and any(record and record["num_documents"] for record in records):
                logger.info(
                    "finished pieces are kept in %s: another run over the same text goes on from there", self._folder
                )
            elif self._folder.exists():
                self.remove()

    def _prepare(self) -> None:
        plan = self._folder / "plan.json"
        with suppress(UserError):  # none, or a damaged one, which is as good as another
            if read_json(plan).get("fingerprint") == self._fingerprint:
                return
        begun = f".{plan.name}.tmp"  # of a plan whose writing was killed
        if not plan.is_file() and any(not p.name.startswith(begun) for p in self._folder.glob("*")):
            raise UserError(
                f"{self._folder} holds files that are not ours (no plan.json); move it away or choose another output"
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        write_atomic(plan, json.dumps({"fingerprint": self._fingerprint}))

    def remove(self) -> None:
        """Delete the folder, when its pieces are joined."""
        shutil.rmtree(self._folder)

    def check_unchanged(self) -> None:
        """Refuse to join pieces of a text that is not that of the plan any more: its bounds were other documents'."""
        for piece in {piece.path: piece for piece in self.pieces}.values():
            piece.check_unchanged()
        names = _datasets_of(self.pieces)
        local = names and all(os.path.exists(hf_datasets.split_name(name)[0]) for name in names)  # the hub: revisions
        if local and plan_fingerprint(self.pieces, self._encoding) != self._fingerprint:
            raise UserError(f"files of {', '.join(names)} were changed while they were being read: start again")

    def bad_lines(self) -> Iterator[tuple[int, BadLine]]:
        """(number of the piece, line) of all that encoding listed; lines count from the start of the file."""
        where, position, lines = "", 0, 0
        for number, piece in enumerate(self.pieces):
            listed = Path(f"{self._prefix(number)}.bad.jsonl")
            if not listed.is_file():
                continue
            if piece.path != where:
                where, position, lines = piece.path, 0, 0
            if piece.kind != "dataset":
                lines += count_lines(piece.path, position, piece.start)
                position = piece.start
            for line in listed.read_text(encoding="utf-8").splitlines():
                found = json.loads(line)
                yield number, BadLine(lines + found["line"], found["reason"], found["content"])

    def collect_bad_lines(self, path: str, limit: int | None) -> Quarantine:
        """One quarantine file of all pieces; UserError for too many."""
        quarantine = Quarantine(path, limit)
        with closing(quarantine):
            bad_lines = groupby(self.bad_lines(), key=itemgetter(0))
            following = next(bad_lines, None)
            for number, piece in enumerate(self.pieces):
                record = self.record(number)
                quarantine.read(record.get("num_lines", record["num_documents"]) if record else 0)
                if following is None or following[0] != number:
                    continue
                for _, bad in following[1]:
                    quarantine.list_line(piece.path, bad)
                if record is None:
                    raise UserError(
                        f"most of the lines read of {piece.path} are bad: {quarantine}; give another --input"
                    )
                following = next(bad_lines, None)
        if quarantine.count:
            logger.warning("%s", quarantine)
        return quarantine


def encode_pieces(
    jobs: Sequence[tuple[Piece, str]],
    prepare: Callable[[Any], EncodePiece],
    settings: Any,
    workers: int,
    limit: int | None,
    remedy: str = "try again with fewer workers",
) -> Iterator[tuple[Piece, str]]:
    """The jobs as they are done, by `prepare(settings)` in each of `workers` processes (1: in this one).

    Returns early where it is clear that bad lines are too many. Closing the iterator, an exception or Ctrl-C ends the
    processes.

    Raises:
        UserError: as the function, and where a process dies.
    """
    num_bad, workers = 0, min(workers, len(jobs))
    with ExitStack() as stack:
        if workers <= 1:
            encode = prepare(settings)
            answers = ((job, encode(job)) for job in jobs)
        else:
            pool = stack.enter_context(WorkerPool(work, (prepare, settings), workers))
            asked = {pool.submit(job): job for job in jobs}
            answers = ((asked[done], done.result()) for done in as_completed(asked))
        try:
            for job, (count, whole) in answers:
                num_bad += count
                if not whole or (limit is not None and num_bad > limit):
                    return
                yield job
        except WorkerEnded as end:
            raise UserError(
                f"a tokenization process ended with exit code {end.returncode} (-9: killed, often for want of memory) "
                f"at {end.request[0].path}; finished pieces are kept: {remedy}"
            ) from None


def work(caller: Caller) -> None:
    """A worker process: told `prepare` and settings, it answers jobs as the function that this gives."""

    def answer(told: tuple[Callable[[Any], EncodePiece], Any]) -> EncodePiece:
        prepare, settings = told
        return prepare(settings)

    caller.serve(answer)
