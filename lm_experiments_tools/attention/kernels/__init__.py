"""Attention functions and their implementations (backends): eager, SDPA, blocks of a CPU, Triton; imports modules."""
