"""Attention functions and their implementations (backends): SDPA, gather, FlexAttention, Triton; imports modules."""
