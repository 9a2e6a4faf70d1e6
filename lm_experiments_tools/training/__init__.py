"""The training loop with its callbacks, losses, metrics and learning-rate schedules.

Modules here import the packages backends, checkpoint and tracking.
"""
