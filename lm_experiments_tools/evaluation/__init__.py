"""Predictions of all workers, stored, measured and written; imports metrics, data.examples, backends.

Text metrics are computed on rank 0 over the strings of all workers: corpus metrics such as BLEU are no means of parts.
"""
