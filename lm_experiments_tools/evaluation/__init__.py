"""Predictions of all workers: stored, measured and written.

Text metrics are computed on rank 0 over all strings: a corpus metric such as BLEU is not the mean over workers.
"""
