"""Record the settings, logs and metrics of a run, and draw its loss curve."""
