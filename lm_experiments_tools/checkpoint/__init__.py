"""Checkpoints: directories that are whole or not there, written and read; imports backends and modules."""
