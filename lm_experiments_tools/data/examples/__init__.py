"""Examples of fine-tuning tasks: rows, prompts, encoding, packing; imports data, data.text and data.objectives."""
