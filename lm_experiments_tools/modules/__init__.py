"""Building blocks and inspection of models of every kind; imports only the top-level files."""
