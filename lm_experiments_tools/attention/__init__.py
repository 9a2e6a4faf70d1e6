"""Attention with block-sparse layouts and learned position biases, for CPU and GPU.

The public names below are imported on first use; Triton, transformers and matplotlib only by what needs them.
"""

import importlib

_HOMES = {
    "AlibiBias": "lm_experiments_tools.attention.bias",
    "Layout": "lm_experiments_tools.attention.plan",
    "T5Bias": "lm_experiments_tools.attention.bias",
    "alibi_slopes": "lm_experiments_tools.attention.bias",
    "attention_probabilities": "lm_experiments_tools.attention.reference",
    "block_sparse_attention": "lm_experiments_tools.attention.functional",
    "explain": "lm_experiments_tools.attention.functional",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
