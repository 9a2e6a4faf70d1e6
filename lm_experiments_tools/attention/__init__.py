"""Attention with block-sparse layouts and learned position biases; imports attention.kernels.

The public names are those of `__init__.pyi`, imported on first use; Triton and transformers only where needed.
"""

from lm_experiments_tools.names import lazy_names

__getattr__, __dir__, _NAMES = lazy_names(__name__)

__all__ = _NAMES
