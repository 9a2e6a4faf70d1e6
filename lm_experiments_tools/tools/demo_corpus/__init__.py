"""A corpus made of the documentation of this Python installation; imports data."""
