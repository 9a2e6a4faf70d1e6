"""Data of a run as sections of facts and samples, a module for each kind of data; imports recipes and data."""
