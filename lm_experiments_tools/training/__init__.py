"""The training loop, its hooks, losses, metrics and schedules; imports backends, checkpoint and tracking."""
