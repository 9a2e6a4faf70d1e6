"""Raw text and vocabularies: reading documents from files and datasets, training and using a vocabulary."""
