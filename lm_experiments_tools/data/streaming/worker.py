"""The process that tokenizes for a streamed run: chunk after chunk of the streams it is asked for.

It imports neither torch nor TensorFlow. A chunk is an ordinary token file, published at once and whole; its sidecar
says where in the stream it begins and ends, so that any chunk can be made again by itself.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.streaming.mixed import MixedPlan
from lm_experiments_tools.data.streaming.text import StreamPlan, StreamTokens
from lm_experiments_tools.data.text.encoding import Encoding
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter, finished_record, token_dtype
from lm_experiments_tools.data.workers import Caller
from lm_experiments_tools.files import locked

FIRST_CHUNK = 1 << 15  # tokens: some hundred KB of text of each stream, and training begins
LARGEST_CHUNK = 1 << 20


def chunk_tokens(number: int) -> int:
    """The least number of tokens of chunk `number` of a stream: 32,768, and twice as many each time up to a million.

    A chunk ends with the document that fills it.
    """
    return min(FIRST_CHUNK << min(number, 30), LARGEST_CHUNK)


def chunk_prefix(folder: str | os.PathLike, stream: int, number: int) -> str:
    """Where a chunk lies."""
    return os.path.join(folder, f"stream-{stream:05d}", f"{number:08d}")


@dataclass(frozen=True)
class ChunkRequest:
    """Make chunk `number` of `stream`, which begins at `begin`; `again`: its bad lines have been listed before."""

    stream: int
    number: int
    begin: dict[str, Any]
    again: bool


@dataclass(frozen=True)
class ChunkSettings:
    """Everything that decides what chunks hold, and the folder of all of them.

    `max_bad_lines` are those of one stream; the caller adds them up over streams.
    """

    plan: StreamPlan | MixedPlan
    folder: str
    encoding: Encoding
    max_bad_lines: int


class ChunkMaker:
    """Makes chunks; goes on in a stream without reading anything twice as long as they are asked for in order."""

    def __init__(self, settings: ChunkSettings):
        self.settings = settings
        self.vocabulary = Vocabulary.load(settings.encoding.vocab_path)
        self._streams: dict[int, StreamTokens] = {}

    def make(self, request: ChunkRequest) -> dict[str, Any]:
        """Make the chunk unless it is there; returns the content of its sidecar."""
        prefix = chunk_prefix(self.settings.folder, request.stream, request.number)
        if found := finished_record(prefix, "end"):
            return found
        tokens = self._stream_at(request)
        num_documents = num_bytes = 0
        whole = False
        try:
            with IndexedDatasetWriter(prefix, token_dtype(self.vocabulary.size)) as writer:
                while writer.num_tokens < chunk_tokens(request.number):
                    ids, size = tokens.next_document()
                    writer.add_sequence(ids)
                    writer.end_document()
                    num_documents += 1
                    num_bytes += size
                meta = {
                    "vocab_sha256": self.settings.encoding.vocab_sha256,
                    "num_documents": num_documents,
                    "num_tokens": writer.num_tokens,
                    "num_bytes": num_bytes,
                    "begin": request.begin,
                    "end": asdict(tokens.position),
                }
                self._publish(writer, prefix, meta)
                whole = True
        finally:
            if not request.again:
                self._list_bad_lines(tokens.take_bad_lines(all_met=not whole))
            if not whole:
                del self._streams[request.stream]
        return meta

    def _stream_at(self, request: ChunkRequest) -> StreamTokens:
        settings, stream = self.settings, self._streams.get(request.stream)
        text = settings.plan.open(
            request.stream,
            request.begin,
            text_key=settings.encoding.text_key,
            max_bad_lines=settings.max_bad_lines,
            listed_in=bad_lines_path(settings.folder),
        )
        if stream is None or stream.position != text.position:
            stream = StreamTokens(text, self.vocabulary, settings.encoding)
            self._streams[request.stream] = stream
        return stream

    def _publish(self, writer: IndexedDatasetWriter, prefix: str, meta: dict[str, Any]) -> None:
        """Another worker may have made the same chunk meanwhile, and may be reading it."""
        with locked(Path(f"{prefix}.lock")):
            if finished_record(prefix, "end"):
                writer.abort()
            else:
                writer.finalize(meta)

    def _list_bad_lines(self, lines: list[dict[str, Any]]) -> None:
        if lines:
            with open(bad_lines_path(self.settings.folder), "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


def bad_lines_path(folder: str | os.PathLike) -> Path:
    """Where bad lines are listed."""
    return Path(folder) / "bad_lines.jsonl"


def work(caller: Caller) -> None:
    """A worker process: told its `ChunkSettings`, it answers each ChunkRequest with the sidecar of the chunk."""
    caller.serve(lambda settings: ChunkMaker(settings).make)
