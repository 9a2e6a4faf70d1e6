"""Estimate the memory that a training run needs, and find settings that fit into a given amount."""
