"""DeepSpeed's `SparseSelfAttention` for code and checkpoints written for it: same call, same buffer, any dtype.

It differs from DeepSpeed's: `rpe` gets a gradient, every instance has its own layout, inputs of any length up to
`max_seq_length` are accepted, and queries that may attend to nothing give zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_experiments_tools.attention.kernels.bias import Bias, dense_bias
from lm_experiments_tools.attention.kernels.dispatch import block_sparse_attention
from lm_experiments_tools.attention.kernels.layout_cache import Layout, describe, num_blocks
from lm_experiments_tools.attention.layouts import SparsityConfig
from lm_experiments_tools.errors import UserError

MODES = "add", "mul"
_BLOCKED = -1e4  # an additive mask this low removes a key in any precision; BERT code adds -10000


class SparseSelfAttention(nn.Module):
    """Block-sparse self-attention with the signature of `deepspeed.ops.sparse_attention.SparseSelfAttention`.

    The layout of `max_seq_length` is made once and stored in the buffer `master_layout`, DeepSpeed's name, so that
    its checkpoints load and a layout is saved with the weights. Shorter inputs use its upper left corner.

    Args:
        sparsity_config: the layout; give layers with different random blocks different `layer_idx`.
        key_padding_mask_mode: "add" for a mask that is added to scores, "mul" for one that is 0 at keys to leave out.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: longest input, a multiple of the block.

    Raises:
        UserError: no layout, a mode that does not exist, or a length that is no multiple of the block.
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
        if not callable(getattr(sparsity_config, "make_layout", None)) or isinstance(sparsity_config, type):
            raise UserError(
                f"SparseSelfAttention: sparsity_config is {describe(sparsity_config)}; it must be a configuration "
                "such as BigBirdSparsityConfig(num_heads=12)."
            )
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.register_buffer("master_layout", torch.as_tensor(sparsity_config.make_layout(max_seq_length)))
        self._layouts: dict[tuple[int, int], Layout] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Bias | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """softmax(query key^T / sqrt(head_dim) + rpe + masks) value over the blocks of the layout.

        Args:
            query, value: [batch, heads, length, head_dim].
            key: the same, or already transposed, [batch, heads, head_dim, length].
            rpe: bias added to the scaled scores, [1 or batch, 1 or heads, length, length], or a T5Bias or AlibiBias;
                trained if it requires gradients.
            key_padding_mask: [batch, length] or [batch, 1, 1, length].
            attn_mask: [length, length], or that after dimensions of 1. A mask that is added removes keys where it is
                -10000 or less.

        Returns:
            [batch, heads, length, head_dim] in the dtype of query.

        Raises:
            UserError: not self-attention, an input longer than max_seq_length, or a mask of another shape.
        """
        batch, _, length, _ = query.shape
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        if not query.shape == key.shape == value.shape:
            raise UserError("SparseSelfAttention: query, key and value must have one shape.")
        bias, keep = rpe, None
        if key_padding_mask is not None:
            keep, added = self._key_padding(key_padding_mask, (batch, length))
            bias = _sum(bias, added, length)
        if attn_mask is not None:
            bias = _sum(bias, self._attention_mask(attn_mask, length, query.dtype), length)
        return block_sparse_attention(query, key, value, self._layout(length), bias=bias, key_padding_mask=keep)

    def _layout(self, length: int) -> Layout:
        """The corner of the master layout, one object per length, because kernels' lists are cached by object."""
        block, master = self.sparsity_config.block, self.master_layout
        blocks = num_blocks(length, block)
        if blocks > master.shape[-1]:
            longest = master.shape[-1] * block
            raise UserError(f"SparseSelfAttention: {length} tokens are more than max_seq_length={longest}.")
        key = blocks, master.data_ptr()  # changes when the module is moved
        if key not in self._layouts:
            self._layouts[key] = Layout(master[:, :blocks, :blocks], block)
        return self._layouts[key]

    def _key_padding(self, mask: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Keys to attend to, bool [batch, length], and what the mask adds to them, [batch, 1, 1, length] or None."""
        mask = _reshaped("key_padding_mask", mask, shape)
        if self.key_padding_mask_mode == "mul":
            return mask != 0, None
        keep = _additive("key_padding_mask", mask) > _BLOCKED
        added = mask.masked_fill(~keep, 0)
        # One synchronization on a GPU is cheaper than a bias for each key that is not needed.
        return keep, added[:, None, None, :] if bool(added.any()) else None

    def _attention_mask(self, mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The mask to add to scores, -inf at removed keys: [1, 1, length, length]."""
        mask = _reshaped("attn_mask", mask, (length, length))[None, None]
        if self.attn_mask_mode == "add":
            return _additive("attn_mask", mask).masked_fill(mask <= _BLOCKED, float("-inf")).to(dtype)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask == 0, float("-inf"))


def _reshaped(name: str, mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """A mask without its dimensions of 1."""
    if mask.dim() < 2 or mask.numel() != shape[0] * shape[1] or mask.shape[-1] != shape[1]:
        raise UserError(f"SparseSelfAttention: {name} has shape {list(mask.shape)}, not {list(shape)}.")
    return mask.reshape(shape)


def _additive(name: str, mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        raise UserError(f"SparseSelfAttention: {name} is {mask.dtype}; pass {name}_mode='mul' or floats to add.")
    return mask


def _sum(bias: Bias | None, added: Tensor | None, length: int) -> Bias | None:
    if added is None:
        return bias
    if bias is None:
        return added.expand(-1, -1, length, -1)
    return (bias if isinstance(bias, Tensor) else dense_bias(bias, length, length)) + added
