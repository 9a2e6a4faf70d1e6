"""One attention call, and its backends: SDPA, gather, FlexAttention, Triton; imports the top-level files."""
