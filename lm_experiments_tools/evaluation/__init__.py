"""Evaluation of fine-tuned models: predictions of all workers are stored, measured by `metrics`, and written."""
