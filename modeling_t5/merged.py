"""Merged attention of T5Gemma 2 (arXiv 2512.14856): self-attention and cross-attention in one softmax.

Both use the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from lm_experiments_tools.attention.kernels.bias import Bias
from lm_experiments_tools.attention.kernels.spec import AttentionInputs, AttentionSpec
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.layers import DECODER_SELF, T5Attention


class T5MergedAttention(T5Attention):
    """Decoder attention over earlier target tokens and all encoder tokens, in one softmax.

    Encoder keys have no positions, and a local window hides target tokens only. Attention weights [batch, heads,
    queries, keys] have target tokens first.

    Raises:
        ValueError: used in another position than a decoder's self-attention, or with positions that are a bias.
    """

    is_merged = True

    def __init__(self, config: T5Config, kind: str, layer_idx: int) -> None:
        if kind != DECODER_SELF:
            raise ValueError(f"{kind}_layer is T5MergedAttention, which is for decoder_self_attention_layer alone.")
        if config.position_embedding_type not in ("rotary", "none"):
            raise ValueError(
                f"T5MergedAttention does not support position_embedding_type={config.position_embedding_type!r}: use "
                '"rotary" or "none".'
            )
        super().__init__(config, kind, layer_idx)

    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        bias: Bias | None = None,
        key_value_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        encoder_spec: AttentionSpec | None = None,
    ) -> tuple[Tensor, Bias | None, Tensor | None]:
        """Compute attention over target and encoder tokens. Other arguments are those of `T5Attention.forward`.

        Args:
            key_value_states: the encoder's output; None for self-attention only.
            encoder_spec: masks of the encoder's tokens, required with an encoder's output.
        """
        if key_value_states is None:
            return super().forward(x, spec, bias, None, past_key_values, output_attentions)
        if spec.bias is not None or encoder_spec.bias is not None:
            raise ValueError("T5MergedAttention takes attention masks of bool or integers, not of floats.")
        offset = self.tokens_seen(past_key_values)
        q = self.split_heads(self.q(x), self.q_norm)
        k, v, rotated_q = self.keys_and_values(q, x, past_key_values, offset, is_cross=False)
        cross_k, cross_v, _ = self.keys_and_values(q, key_value_states, past_key_values, offset, is_cross=True)
        parts = (k, self.own_spec(spec, q, k, offset)), (cross_k, encoder_spec)
        masks = [_allowed(q, keys, part) for keys, part in parts]
        num_heads = max(mask.shape[1] for mask in masks)
        mask = torch.cat([mask.expand(-1, num_heads, -1, -1) for mask in masks], -1)
        k, v = torch.cat([k, cross_k], 2), torch.cat([v, cross_v], 2)
        output, weights = self.attend(rotated_q, k, v, None, AttentionSpec(mask=mask), output_attentions)
        return self.join_heads(output), None, weights


def _allowed(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """True where the spec lets queries see keys, bool [B, 1 or heads, Q, K]."""
    everything = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    allowed = AttentionInputs(q, k, k, spec).allowed()
    return everything if allowed is None else everything & allowed
