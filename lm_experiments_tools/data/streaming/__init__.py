"""Training while the text is still being tokenized; imports data, data.text, data.tokens, data.objectives."""
