"""One attention call, and its backends: SDPA, gather, FlexAttention, Triton; imports modules."""
