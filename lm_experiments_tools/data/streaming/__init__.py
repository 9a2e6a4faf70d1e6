"""Training while the text is still being tokenized; depends on data, data.text, data.tokens and data.objectives."""
