"""Attention with block-sparse layouts and learned position biases; imports attention.kernels.

The public names below are imported on first use; Triton, transformers and matplotlib only by what needs them.
"""

from lm_experiments_tools.names import lazy_names

_HOMES = {
    "alibi_slopes": "lm_experiments_tools.attention.kernels.bias",
    "AlibiBias": "lm_experiments_tools.attention.kernels.bias",
    "attend": "lm_experiments_tools.attention.kernels.dispatch",
    "attention_probabilities": "lm_experiments_tools.attention.kernels.reference",
    "AttentionSpec": "lm_experiments_tools.attention.kernels.spec",
    "BigBirdSparsityConfig": "lm_experiments_tools.attention.layouts",
    "block_sparse_attention": "lm_experiments_tools.attention.kernels.dispatch",
    "BSLongformerSparsityConfig": "lm_experiments_tools.attention.layouts",
    "DenseSparsityConfig": "lm_experiments_tools.attention.layouts",
    "enable": "lm_experiments_tools.attention.huggingface",
    "explain": "lm_experiments_tools.attention.kernels.dispatch",
    "FixedSparsityConfig": "lm_experiments_tools.attention.layouts",
    "get_sparsity_config": "lm_experiments_tools.attention.layouts",
    "Layout": "lm_experiments_tools.attention.kernels.layout_cache",
    "LocalSlidingWindowSparsityConfig": "lm_experiments_tools.attention.layouts",
    "register": "lm_experiments_tools.attention.huggingface",
    "SparseSelfAttention": "lm_experiments_tools.attention.sparse_self_attention",
    "SparsityConfig": "lm_experiments_tools.attention.layouts",
    "T5Bias": "lm_experiments_tools.attention.kernels.bias",
    "VariableSparsityConfig": "lm_experiments_tools.attention.layouts",
}

__all__ = list(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
