"""Context-dependent queries: attention queries that also depend on a summary of the whole input.

It is the "cdQ" attention of t5-experiments, with its parameter names. A context-dependent head h pools the input's
hidden states x (D features each) into one vector P_h, and computes each token's query q_h (d features) from both::

    P_h = softmax over tokens of T_h relu(W_t x)  times  x      [D], without padding
    q_h = cd_q cd_w [P_h; x]                                    [d]

T_h, W_t, cd_q and cd_w are learned matrices. Other heads are unchanged. If half of the heads are context-dependent,
both halves share keys, values and bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from lm_experiments_tools.attention.kernels.bias import Bias
from lm_experiments_tools.attention.kernels.spec import AttentionSpec
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.layers import ENCODER_SELF, T5Attention, limit_float16


class T5CDQAttention(T5Attention):
    """`T5Attention` whose queries also depend on a summary of the input, in `num_cdq_heads` of the heads.

    `num_cdq_heads` is half of `num_heads`, all, or 0. See the module for the formula.

    Raises:
        ValueError: in a decoder, where the pooled vector would reveal the tokens to predict.
    """

    def __init__(self, config: T5Config, kind: str, layer_idx: int) -> None:
        if kind != ENCODER_SELF:
            raise ValueError(
                f"{kind}_layer is T5CDQAttention, which is for encoders alone: its queries depend on the whole "
                "sequence, so that a decoder would see the tokens it is to predict."
            )
        self.num_cdq_heads = config.num_cdq_heads
        super().__init__(_with_heads(config, config.num_cdq_heads or config.num_heads), kind, layer_idx)
        self.config = config  # the model's own, in which the attention implementation may change
        if not self.num_cdq_heads:
            return
        if self.num_cdq_heads == config.num_heads:
            self.q = None
        self.cd_q = nn.Linear(config.d_model, config.d_kv, bias=False)
        self.cd_w = nn.Linear(2 * config.d_model, config.d_model, bias=False)
        self.T = nn.Linear(config.d_model, self.num_cdq_heads, bias=False)
        self.W_t = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o = nn.Linear(config.num_heads * config.d_kv, config.d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        bias: Bias | None = None,
        key_value_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Bias | None, Tensor | None]:
        if not self.num_cdq_heads:
            return super().forward(x, spec, bias, output_attentions=output_attentions)
        k, v = self.split_heads(self.k(x)), self.split_heads(self.v(x))
        bias = self.position_bias(bias, k.shape[2], k.shape[2], 0, x.device)
        queries = [self.context_queries(x, spec)]
        if self.q is not None:
            queries.insert(0, self.split_heads(self.q(x)))
        pairs = [self.position.rotate(q, k) for q in queries]
        outputs, weights = zip(
            *[self.attend(q, turned, v, bias, spec, output_attentions) for q, turned in pairs], strict=True
        )
        weights = None if weights[0] is None else torch.cat(weights, dim=1)
        return self.join_heads(torch.cat(outputs, dim=1)), bias, weights

    def context_queries(self, x: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute context-dependent queries [batch, num_cdq_heads, length, d_kv] from x [batch, length, d_model].

        Args:
            spec: holds the padding mask; padding does not count in the summary of the input.
        """
        scores = self.T(F.relu(limit_float16(self.W_t(x)))).transpose(1, 2)  # [B, heads, L]
        visible = spec.key_padding_mask
        if spec.mask is not None:  # a token counts if any other may attend to it
            visible = spec.mask.any(dim=2).any(dim=1)
        if spec.bias is not None:  # as much as for the query that attends to it most
            scores = scores + spec.bias.to(scores.dtype).amax(dim=(1, 2))[:, None]
        scores = limit_float16(scores)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(x.dtype)
        pooled = F.dropout(weights, self.dropout, self.training) @ x  # [B, heads, D]
        # The pooled vector's part of a query is the same for all tokens, a token's for all heads: no [B, heads, L, D].
        queries = self._queries(pooled, torch.zeros_like(pooled))[:, :, None]
        return limit_float16(queries + self._queries(torch.zeros_like(x), x)[:, None])

    def _queries(self, pooled: Tensor, x: Tensor) -> Tensor:
        """cd_q cd_w [P; x], which is linear in both, [B, any, d]."""
        return limit_float16(self.cd_q(limit_float16(self.cd_w(torch.cat([pooled, x], dim=-1)))))


def _with_heads(config: T5Config, num_heads: int) -> T5Config:
    """The configuration of the part that keys, values and positions make up."""
    values = {**config.to_dict(), "num_heads": num_heads, "num_cdq_heads": 0}
    shared = type(config)(**values)
    shared.is_decoder = config.is_decoder
    return shared
