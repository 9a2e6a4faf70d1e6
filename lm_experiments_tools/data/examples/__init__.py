"""Examples for fine-tuning: rows, prompts, encoding, packing; depends on data, data.text and data.objectives."""
