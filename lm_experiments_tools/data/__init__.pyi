"""The public names: lazy_names reads them here, and type checkers and editors do too."""

from lm_experiments_tools.ancestor.bert_data import MixtureDataset as MixtureDataset
from lm_experiments_tools.data.text.records import Record as Record
from lm_experiments_tools.data.text.records import records as records
from lm_experiments_tools.data.text.tokenizer import Tokenizer as Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset as IndexedDataset
from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter as IndexedDatasetWriter
from lm_experiments_tools.data.tokens.tokenize import ensure_tokenized as ensure_tokenized
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus as tokenize_corpus
from lm_experiments_tools.tools.train_vocabulary import train_vocab as train_vocab
