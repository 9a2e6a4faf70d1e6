"""Dataset functions under t5-experiments' path: `from megatron.data.dataset_utils import get_indexed_dataset_`."""

from lm_experiments_tools.ancestor.bert_data import get_indexed_dataset_

__all__ = ["get_indexed_dataset_"]
