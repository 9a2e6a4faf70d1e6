"""Checkpoints, which are complete or absent: written and read; imports backends and modules."""
