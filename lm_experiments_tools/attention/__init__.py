"""Self-attention with block-sparse layouts and learned position biases; imports attention.kernels.

A block-sparse layout says which blocks of keys each block of queries attends to. Triton and transformers are imported
only where they are needed.
"""

from lm_experiments_tools.names import lazy_names

__getattr__, __dir__, _NAMES = lazy_names(__name__)

__all__ = _NAMES
