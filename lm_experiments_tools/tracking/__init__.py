"""Record a run: run directory, metrics.jsonl, TensorBoard, trackio, wandb, console, loss curve."""
