"""Replacement for DeepSpeed's `SparseSelfAttention`, for code and checkpoints that use it.

Differences from DeepSpeed:

- `rpe` gets a gradient; in DeepSpeed a learned bias never trains.
- Every instance has its own layout; in DeepSpeed layers of equal length share the first one's.
- Any length up to `max_seq_length` is padded inside.
- It runs on CPU and in any precision.
- Queries without an allowed key give zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_experiments_tools.attention.kernels.bias import Bias, dense_bias
from lm_experiments_tools.attention.kernels.call import block_sparse_attention
from lm_experiments_tools.attention.kernels.layout_cache import Layout, cached, num_blocks
from lm_experiments_tools.attention.layouts import SparsityConfig
from lm_experiments_tools.errors import UserError

MODES = "add", "mul"
# An additive mask this low leaves nothing of a key in any precision; BERT code adds -10000.
_BLOCKED = -1e4


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention with the signature of `deepspeed.ops.sparse_attention.SparseSelfAttention`.

    The layout for `max_seq_length` is built once and stored in the buffer `master_layout`, as in DeepSpeed, so that
    its checkpoints load. Shorter inputs use the upper left corner of this layout.

    Args:
        sparsity_config: the layout; give each layer its own `layer_idx` to draw different random blocks.
        key_padding_mask_mode: "add": the mask is added to scores. "mul": keys with mask 0 are left out.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: longest input in tokens, a multiple of the block. Raises UserError.
    """

    master_layout: Tensor

    @torch.inference_mode(False)  # a module built in that mode can load checkpoints and be trained too
    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MODES:
                raise UserError(f"SparseSelfAttention: {name}={mode!r} is neither 'add' nor 'mul'.")
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Bias | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax(query key^T / sqrt(head_dim) + rpe + masks) value over the blocks of the layout.

        Args:
            query, value: [batch, heads, length, head_dim].
            key: the same, or already transposed, [batch, heads, head_dim, length].
            rpe: bias added to the scaled scores, as in `block_sparse_attention`.
            key_padding_mask: [batch, length] or [batch, 1, 1, length].
            attn_mask: [length, length], or with leading dimensions of 1. In mode "add" values of -10000 or less mask a
                key.

        Returns:
            [batch, heads, length, head_dim] in the dtype of query. Raises UserError.
        """
        length = query.shape[2]
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        bias, keep = rpe, None
        if key_padding_mask is not None:
            mode, shape = self.key_padding_mask_mode, (len(query), length)
            added = _additive("key_padding_mask", key_padding_mask, mode, query, shape)
            keep = added > -torch.inf
            others = added.masked_fill(~keep, 0)
            # Looking costs one synchronisation on a GPU; a bias for each key where none is wanted costs far more.
            if mode == "add" and bool(others.any()):
                bias = _plus(bias, others[:, None, None, :], length)
        if attn_mask is not None:
            mask = _additive("attn_mask", attn_mask, self.attn_mask_mode, query, (length, length))
            bias = _plus(bias, mask[None, None], length)
        return block_sparse_attention(query, key, value, self._layout(length), bias=bias, key_padding_mask=keep)

    def _layout(self, length: int) -> Layout:
        """The corner of the master layout, one object a length, since kernels' lists are cached by object."""
        block, master = self.sparsity_config.block, self.master_layout
        blocks = num_blocks(length, block)
        # `load_state_dict` writes into the buffer, which changes its version
        version = 0 if master.is_inference() else master._version
        return cached(master, ("corner", blocks, version), lambda: Layout(master[:, :blocks, :blocks].clone(), block))


def _additive(name: str, mask: Tensor, mode: str, query: Tensor, shape: tuple[int, int]) -> Tensor:
    """A mask as it is added to scores, -inf where it leaves nothing: of `shape`, which it may have among others of 1.

    Raises UserError: another shape, or whole numbers to be added.
    """
    sizes, expected = ([size for size in one if size > 1] for one in (mask.shape, shape))
    if mask.dim() < 2 or mask.shape[-1] != shape[1] or sizes != expected:
        raise UserError(f"SparseSelfAttention: {name} has shape {list(mask.shape)}, not {list(shape)}.")
    mask = mask.reshape(shape)
    if mode == "mul":
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask == 0, -torch.inf)
    if not mask.is_floating_point():
        raise UserError(
            f"SparseSelfAttention: {name} is {mask.dtype}, but is to be added to scores: pass {name}_mode='mul', "
            "or numbers that are 0 at what to keep and very negative elsewhere."
        )
    return mask.masked_fill(mask <= _BLOCKED, -torch.inf).to(query.dtype)


def _plus(bias: Bias | None, added: Tensor, length: int) -> Bias:
    """The bias with a mask [1 or batch, 1, 1 or length, length]."""
    if bias is None:
        return added.expand(-1, -1, length, -1)
    return (bias if isinstance(bias, Tensor) else dense_bias(bias, length, length)) + added
