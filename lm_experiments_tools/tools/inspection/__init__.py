"""Data of a run as `lmtools inspect` shows it: one module for each kind of data, and what they share."""
