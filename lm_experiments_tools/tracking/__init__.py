"""Run directory, metrics.jsonl, TensorBoard, trackio and wandb, console, loss curve."""
