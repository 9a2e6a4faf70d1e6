"""Text for causal language modelling, tokenized by a Hugging Face tokenizer into one stream, for `CausalLMDataset`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from lm_experiments_tools.data.examples.ragged import RaggedBuilder
from lm_experiments_tools.data.examples.rows import BadRows
from lm_experiments_tools.data.examples.text_encoder import TokenCounts, end_id
from lm_experiments_tools.data.text.records import records
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # documents tokenized by one call


def tokenize_text(inputs: Sequence[str], tokenizer: Any, bad: BadRows) -> np.ndarray:
    """int32[total]: documents of `inputs` (see data/text/sources.py), each followed by the token that ends a text.

    Raises UserError without text.
    """
    end = end_id(tokenizer)
    builder = RaggedBuilder()
    documents, unknown = records(inputs, "text", bad), TokenCounts(tokenizer)
    while some := [document.value for document in islice(documents, _AT_ONCE)]:
        ids = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        builder.extend([*row, end] for row in ids)
        unknown.add(ids)
    bad.report()
    if unknown.unknown:
        level = logging.WARNING if unknown.has_many_unknown else logging.INFO
        logger.log(level, "%s", unknown.describe_unknown(", ".join(inputs)))
    tokens = builder.build().values
    if not len(tokens):
        raise UserError(f"there is no text in {', '.join(inputs)} ({bad.count} bad lines).")
    return tokens
