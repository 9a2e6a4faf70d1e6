"""BERT datasets for t5-experiments' programs, with Megatron's names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from lm_experiments_tools.ancestor.notice import notice
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.mixture import blending_order
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from megatron.bert_dataset import BertDataset as Rows
from megatron.tokenizers import build_tokenizer

_NAMES = {"input_ids": "text", "token_type_ids": "types", "attention_mask": "padding_mask", "labels": "labels"}


def get_indexed_dataset_(data_prefix: str | os.PathLike, data_impl: str = "mmap", skip_warmup: bool = False) -> Any:
    """Open the memory-mapped token file PREFIX.bin with PREFIX.idx. The other arguments have no effect."""
    notice("megatron.data.dataset_utils", "lm_experiments_tools.IndexedDataset(prefix)")
    return IndexedDataset(data_prefix)


def hf_tokenizer(name_or_path: str) -> Tokenizer:
    """Load a Hugging Face tokenizer; its special token ids are the attributes cls, sep, mask and pad."""
    notice("megatron.tokenizer", "megatron.tokenizers.build_tokenizer('HFTokenizer', name_or_path=...)")
    tokenizer = build_tokenizer("HFTokenizer", name_or_path=name_or_path)
    vars(tokenizer).update({role: getattr(tokenizer, f"{role}_id") for role in ("cls", "sep", "mask", "pad")})
    return tokenizer


class BertDataset:
    """BERT samples as torch's DataLoader reads them, with the arguments of t5-experiments' programs.

    A sample has `text`, `types`, `padding_mask`, `labels`, `loss_mask` int64[max_seq_length] and `is_random`. The
    masked tokens are the same in each epoch, as in t5-experiments. `name` and `data_prefix` have no effect.
    """

    def __init__(
        self,
        name: str,
        indexed_dataset: IndexedDataset,
        data_prefix: str | os.PathLike | None,
        num_epochs: int | None,
        max_num_samples: int | None,
        masked_lm_prob: float,
        max_seq_length: int,
        short_seq_prob: float,
        seed: int,
        binary_head: bool,
        tokenizer: Tokenizer | None = None,
        mask_label_id: int = -1,
    ) -> None:
        notice("megatron.data.bert_dataset", "run_bert_pretraining.py, or megatron.bert_dataset.BertDataset")
        if tokenizer is None:
            raise UserError("BertDataset needs tokenizer=: there is no global one, as Megatron's arguments made.")
        rows = Rows(
            indexed_dataset,
            tokenizer,
            max_seq_length=max_seq_length,
            masked_lm_prob=masked_lm_prob,
            short_seq_prob=short_seq_prob,
            binary_head=bool(binary_head),
            num_epochs=num_epochs,
            max_num_samples=max_num_samples,
            mask_label_id=mask_label_id,
            seed=seed,
        )
        self.samples, self.mask_label_id = Dataset(rows), mask_label_id

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = {name: values[0] for name, values in self.samples.batch(np.array([index])).items()}
        sample = {_NAMES[name]: row[name] for name in _NAMES}
        sample["loss_mask"] = (sample["labels"] != self.mask_label_id).astype(np.int64)
        return {**sample, "is_random": int(row.get("next_sentence_label", 0))}


class MixtureDataset:
    """Mix ceil(weight x length) samples of each dataset in Megatron's order; without weights, all samples once."""

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        weights = [1.0] * len(datasets) if weights is None else list(weights)
        if len(weights) != len(datasets) or not datasets:
            raise UserError(f"There are {len(weights)} weights for {len(datasets)} datasets: give one for each.")
        self.datasets = list(datasets)
        quotas = np.array([ceil(w * len(d)) for w, d in zip(weights, datasets, strict=True)], np.int64)
        self.members = blending_order(quotas / quotas.sum(), int(quotas.sum()), quotas)
        self.numbers = np.empty(len(self.members), np.int64)
        for member, dataset in enumerate(datasets):
            own = self.members == member
            self.numbers[own] = np.arange(own.sum()) % len(dataset)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> Any:
        return self.datasets[self.members[index]][int(self.numbers[index])]
