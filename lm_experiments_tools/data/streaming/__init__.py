"""Training on text that is tokenized during the run (`--streaming`), without token files.

This package imports `data`, `data.text`, `data.tokens` and `data.objectives`.
"""
