"""Training objectives: from a token stream to numbered examples; imports data, data.text and config."""
