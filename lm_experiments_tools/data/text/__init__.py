"""Raw text and tokenizers: documents of files and datasets, and their ids."""
