"""The training loop, its callbacks, losses, metrics and schedules; imports backends, checkpoint and tracking."""
