"""Raw text and vocabularies: reading documents, training and using a vocabulary; depends on data."""
