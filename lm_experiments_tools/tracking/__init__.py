"""The record of a run: its directory, TensorBoard, metrics.jsonl, console and curve; imports the top-level files."""
