"""Training on text that is tokenized during the run (`--streaming`), without token files."""
