"""The class BertDataset under t5-experiments' path: `from megatron.data.bert_dataset import BertDataset`."""

from lm_experiments_tools.ancestor.bert_data import BertDataset

__all__ = ["BertDataset"]
