"""Fine-tuning examples: reading rows of files, building prompts, tokenizing and packing."""
