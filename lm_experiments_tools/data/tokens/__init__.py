"""Token files in Megatron's format: written, merged and memory-mapped; depends on data.text and config."""
