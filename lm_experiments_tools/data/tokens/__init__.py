"""Token files in Megatron's format: written, merged and memory-mapped; imports data.text and config."""
