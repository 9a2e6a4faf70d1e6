"""Numbered training examples: their order, mixtures and loaders; imports config and the top-level files."""
