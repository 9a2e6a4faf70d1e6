"""Attention with block-sparse layouts and learned position biases, for CPU and GPU.

The public names below are imported on first use; Triton, transformers and matplotlib only by what needs them.
"""

import importlib

_HOMES = {
    "alibi_slopes": "lm_experiments_tools.attention.bias",
    "AlibiBias": "lm_experiments_tools.attention.bias",
    "attention_probabilities": "lm_experiments_tools.attention.reference",
    "BigBirdSparsityConfig": "lm_experiments_tools.attention.layouts",
    "block_sparse_attention": "lm_experiments_tools.attention.functional",
    "BSLongformerSparsityConfig": "lm_experiments_tools.attention.layouts",
    "DenseSparsityConfig": "lm_experiments_tools.attention.layouts",
    "enable": "lm_experiments_tools.attention.huggingface",
    "explain": "lm_experiments_tools.attention.functional",
    "FixedSparsityConfig": "lm_experiments_tools.attention.layouts",
    "get_sparsity_config": "lm_experiments_tools.attention.layouts",
    "Layout": "lm_experiments_tools.attention.plan",
    "LocalSlidingWindowSparsityConfig": "lm_experiments_tools.attention.layouts",
    "register": "lm_experiments_tools.attention.huggingface",
    "SparseSelfAttention": "lm_experiments_tools.attention.sparse_self_attention",
    "SparsityConfig": "lm_experiments_tools.attention.layouts",
    "T5Bias": "lm_experiments_tools.attention.bias",
    "VariableSparsityConfig": "lm_experiments_tools.attention.layouts",
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
