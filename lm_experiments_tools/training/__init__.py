"""The training loop with its callbacks, losses, metrics and learning-rate schedules."""
