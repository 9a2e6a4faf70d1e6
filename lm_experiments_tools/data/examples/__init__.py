"""Fine-tuning examples: reading rows of files, building prompts, tokenizing and packing.

This package depends on `data`, `data.text` and `data.objectives`.
"""
