"""Raw text and vocabularies: reading documents from files and datasets, training and using a vocabulary.

This package depends on `lm_experiments_tools.data`.
"""
