"""Numbered training examples: their order, mixtures and loaders; imports config and the top-level files.

The public names of the rooms below it are imported on first use.
"""

from lm_experiments_tools.names import lazy_names

_HOMES = {
    "Record": "lm_experiments_tools.data.text.records",
    "records": "lm_experiments_tools.data.text.records",
    "IndexedDataset": "lm_experiments_tools.data.tokens.indexed",
    "IndexedDatasetWriter": "lm_experiments_tools.data.tokens.indexed",
    "MixtureDataset": "lm_experiments_tools.ancestor.bert_data",
    "Vocabulary": "lm_experiments_tools.data.text.vocabulary",
    "tokenize_corpus": "lm_experiments_tools.data.tokens.tokenize",
    "ensure_tokenized": "lm_experiments_tools.data.tokens.tokenize",
    "train_vocab": "lm_experiments_tools.data.text.train_vocabulary",
}

__all__ = list(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
