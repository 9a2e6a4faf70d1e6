"""Gather the predictions of all workers on rank 0, compute metrics over all of them, and write them to a file."""
