"""Text for causal language modelling, tokenized by a Hugging Face tokenizer into one stream, for `CausalLMDataset`."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lm_experiments_tools.data.examples.ragged import RaggedBuilder
from lm_experiments_tools.data.examples.rows import BadRows
from lm_experiments_tools.data.examples.text_encoder import UnknownTokens, end_id
from lm_experiments_tools.data.text.bad_lines import BadLine, EmptyText
from lm_experiments_tools.data.text.documents import plan_pieces, read_piece
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # documents tokenized by one call


@dataclass
class TextStream:
    """A `TokenSource`: documents one after the other, each followed by the token that ends a text.

    Attributes:
        tokens: int32[total].
    """

    tokens: np.ndarray
    fingerprint: str


def tokenize_text(inputs: Sequence[str], tokenizer: Any, bad: BadRows) -> TextStream:
    """The documents of `inputs` (as `documents.plan_pieces`) as one stream.

    Raises:
        UserError: inputs that cannot be read or hold no text, too many bad lines, a tokenizer without an end of text.
    """
    end = end_id(tokenizer)
    builder = RaggedBuilder()
    documents, unknown = _texts(inputs, bad), UnknownTokens.of(tokenizer)
    while some := list(islice(documents, _AT_ONCE)):
        ids = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        builder.extend([*row, end] for row in ids)
        unknown.add(ids)
    bad.report()
    if unknown.unknown:
        level = logging.WARNING if unknown.are_many else logging.INFO
        logger.log(level, "%s", unknown.describe(", ".join(inputs)))
    tokens = builder.build().values
    if not len(tokens):
        raise UserError(f"there is no text in {', '.join(inputs)} ({bad.count} bad lines).")
    return TextStream(tokens, hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest())


def _texts(inputs: Sequence[str], bad: BadRows) -> Iterator[str]:
    for piece in plan_pieces(inputs, piece_bytes=sys.maxsize):
        for item in read_piece(piece):
            if isinstance(item, EmptyText):
                continue
            if isinstance(item, BadLine):
                bad.add(f"{piece.path}:{item.line}", item.reason)
            else:
                bad.read()
                yield item.text
