"""Training objectives: from a tape of tokens to numbered examples; imports data, data.text and config."""
