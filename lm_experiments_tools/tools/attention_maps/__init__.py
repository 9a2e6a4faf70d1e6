"""Attention maps of a model and pictures of layouts; imports models and attention."""
