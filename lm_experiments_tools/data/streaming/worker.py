"""Worker process of a `--streaming` run: tokenizes the documents of its streams, chunk by chunk, without torch."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.streaming.text import Position, StreamPlan, StreamText
from lm_experiments_tools.data.text.records import Rejected, utf8_length
from lm_experiments_tools.data.tokens.tokenize import TextEncoder, batches
from lm_experiments_tools.data.workers import Caller

FIRST_CHUNK = 1 << 15  # tokens: some hundred KB of text of each stream, and training begins
LARGEST_CHUNK = 1 << 20
_BATCH_BYTES = 1 << 16  # text per call into the vocabulary: small, so that the first chunk is ready soon


def chunk_tokens(number: int) -> int:
    """Return the minimum number of tokens in chunk `number` of a stream: 32,768, doubled up to about a million.

    A chunk is the text that is tokenized at a time. The first chunks are small so that training starts soon.
    """
    return min(FIRST_CHUNK << min(number, 30), LARGEST_CHUNK)


@dataclass(frozen=True)
class ChunkRequest:
    """Request to a worker process to tokenize the next documents of a stream, which together form a chunk.

    A stream is an endless sequence of documents, a fixed part of the text.

    Attributes:
        text, stream, number: index of the text, of its stream, and of the chunk in that.
        num_before: examples of the stream before the chunk.
        begin: position in the text where the chunk starts, a `Position` as JSON.
        again: True if the chunk was made before, so that its rejected records are listed already.
    """

    text: int
    stream: int
    number: int
    num_before: int
    begin: dict[str, Any]
    again: bool


@dataclass(frozen=True)
class ChunkSettings:
    """Settings of a worker process that tokenizes text for `--streaming`.

    Attributes:
        plans: how each text is divided among streams.
        folder: folder for the list of unusable records.
        encoder: converts text to token ids.
        max_bad_lines: maximum number of unusable records of all streams that a training process reads; None for
            the default limit.
    """

    plans: tuple[StreamPlan, ...]
    folder: str
    encoder: TextEncoder
    max_bad_lines: int | None


@dataclass(frozen=True)
class Chunk:
    """Result of tokenizing a chunk of a stream: the tokens of consecutive whole documents, and where the text goes on.

    Attributes:
        tokens: ids of the documents, one document after the other.
        end: position after the last document, a `Position` as JSON.
    """

    tokens: np.ndarray
    end: dict[str, Any]


class StreamTokens:
    """Token ids of the documents of one stream, document by document.

    Attributes:
        position: position after the last document that was returned.
    """

    def __init__(self, text: StreamText, encoder: TextEncoder):
        self.text, self._encoder = text, encoder
        self._encoded = self._encode()
        self.position = text.position

    def next_document(self) -> np.ndarray:
        """Return the ids of the next document. Raises the same errors as iterating a `StreamText`."""
        ids, self.position = next(self._encoded)
        return ids

    def _encode(self) -> Iterator[tuple[np.ndarray, Position]]:
        found = ((document, self.text.position) for document in self.text)
        for batch in batches(found, lambda item: utf8_length(item[0].value), _BATCH_BYTES):
            encoded = self._encoder.encode([part for document, _ in batch for part in self._encoder.parts(document)])
            ids = np.split(encoded.ids, np.cumsum(encoded.sequence_lengths)[:-1])
            yield from zip(ids, [position for _, position in batch], strict=True)


class ChunkMaker:
    """Reads and tokenizes the text of streams, one chunk of documents for each request of the training process.

    A stream's files stay open from chunk to chunk.
    """

    def __init__(self, settings: ChunkSettings):
        self.settings = settings
        self._streams: dict[tuple[int, int], StreamTokens] = {}

    def make(self, request: ChunkRequest) -> Chunk:
        """Tokenize the requested chunk of a stream. Raises the same errors as iterating a `StreamText`."""
        stream, documents, size = self._stream_at(request), [], 0
        rejected, before, finished = stream.text.rejected, stream.position.rejected, False
        try:
            while size < chunk_tokens(request.number):
                documents.append(stream.next_document())
                size += len(documents[-1])
            finished = True
        finally:
            num_rejected = stream.position.rejected - before if finished else len(rejected)  # else all read ahead
            if not request.again:
                self._list(rejected[:num_rejected])
            del rejected[:num_rejected]
            if not finished:
                del self._streams[request.text, request.stream]
        return Chunk(np.concatenate(documents).astype(self.settings.encoder.dtype), asdict(stream.position))

    def _stream_at(self, request: ChunkRequest) -> StreamTokens:
        settings, where = self.settings, (request.text, request.stream)
        stream, begin = self._streams.get(where), Position(**request.begin)
        if stream is None or stream.position != begin:
            text = StreamText(
                settings.plans[request.text], request.stream, begin, settings.encoder.key, settings.max_bad_lines,
                listed_in=rejected_path(settings.folder),
            )  # fmt: skip
            stream = self._streams[where] = StreamTokens(text, settings.encoder)
        return stream

    def _list(self, rejected: list[Rejected]) -> None:
        if rejected:
            with open(rejected_path(self.settings.folder), "a", encoding="utf-8") as file:
                file.writelines(f"{record.to_json()}\n" for record in rejected)


def rejected_path(folder: str | os.PathLike) -> Path:
    """Return the path of the list of records that could not be used, in the folder of a streamed run."""
    return Path(folder) / "bad_lines.jsonl"


def work(caller: Caller) -> None:
    """Run the worker process of a streamed run, which answers each ChunkRequest with a Chunk."""
    caller.serve(lambda settings: ChunkMaker(settings).make)
