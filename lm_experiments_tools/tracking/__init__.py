"""The record of a run: directory, metrics.jsonl, TensorBoard, services, console, curve; imports top-level files."""
