"""Record the settings, logs and metrics of a run, and draw its loss curve.

Metrics go to metrics.jsonl, TensorBoard, trackio, wandb and the console.
"""
