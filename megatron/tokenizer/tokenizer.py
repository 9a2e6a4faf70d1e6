"""Tokenizer classes under t5-experiments' path: `from megatron.tokenizer.tokenizer import _HFAutoTokenizer`."""

from lm_experiments_tools.ancestor.bert_data import hf_tokenizer as _HFAutoTokenizer

__all__ = ["_HFAutoTokenizer"]
