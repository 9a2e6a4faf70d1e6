"""Raw text and vocabularies: readers of documents, training and using a vocabulary; imports data."""
