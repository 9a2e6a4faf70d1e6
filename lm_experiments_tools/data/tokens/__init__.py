"""Token files in Megatron's format (.bin and .idx): writing, merging and memory-mapped reading."""
