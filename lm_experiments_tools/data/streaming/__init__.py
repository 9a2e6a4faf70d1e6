"""Training on text that is tokenized during the run (`--streaming`), without token files.

This package depends on `data`, `data.text`, `data.tokens` and `data.objectives`.
"""
