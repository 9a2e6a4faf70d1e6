"""The layers of T5, with the module names of transformers' T5.

Shapes: B sequences, Q queries and K keys (Q = K = L in self-attention), D features (`d_model`), H heads of d features
(`d_kv`).

float16: T5's activations exceed its range, so each float16 result of a matrix product or sum is clamped
(`limit_float16`), before an infinity can become NaN.

Fused operations make a training step faster (`use_fast_step`). In float32 results equal those of the plain operations
up to rounding. Under autocast to bfloat16, hidden states between the layers are bfloat16, while norms, softmax and the
position bias stay in float32.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache, GradientCheckpointingLayer
from transformers.activations import ACT2FN, NewGELUActivation

from lm_experiments_tools.attention.huggingface import layer_layout
from lm_experiments_tools.attention.kernels.bias import Bias, shared_bias
from lm_experiments_tools.attention.kernels.call import AttentionSpec, attend, backend_of, limit_float16
from lm_experiments_tools.attention.positions import (
    NoPosition,
    PositionScheme,
    RelativeBiasPosition,
    named_position,
    rotates,
)
from lm_experiments_tools.modules.fast_step import Dropout, joined, joint_product
from lm_experiments_tools.names import resolve_configured
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.masks import with_cache, with_window

ENCODER_SELF = "encoder_self_attention"
DECODER_SELF = "decoder_self_attention"
DECODER_CROSS = "decoder_cross_attention"


def activate(activation: nn.Module, x: Tensor) -> Tensor:
    """Apply an activation function to x; transformers' gelu_new is computed by torch's fused GELU.

    Both have the same formula.
    """
    return F.gelu(x, approximate="tanh") if type(activation) is NewGELUActivation else activation(x)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply T5's norm (root mean square), computed in float32 and returned in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class T5LayerNorm(nn.Module):
    """T5's norm: root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467), with the mean in float32."""

    is_fast = False

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fast and x.dtype == torch.bfloat16:
            return norm(x, self.weight, self.eps)
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class FeedForward(nn.Module):
    """Base of T5's feed-forward networks, which compute wo(inner(x)): subclasses define `inner`.

    `wo` is the output layer. `inner_layers` lists the linear layers that `inner` uses.
    """

    inner_layers: tuple[str, ...]
    is_fast = False

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        for name in self.inner_layers:
            self.add_module(name, nn.Linear(config.d_model, config.d_ff, bias=False))
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = Dropout(config.dropout_rate)
        self.activation = ACT2FN[config.dense_act_fn]

    def act(self, x: Tensor) -> Tensor:
        """Apply the activation function. float16 is computed in float32, because GELU's cube would overflow."""
        if x.dtype == torch.float16:
            return self.activation(x.float()).to(x.dtype)
        return activate(self.activation, x) if self.is_fast else self.activation(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(limit_float16(self.inner(x)))
        is_cast = self.is_fast and torch.is_autocast_enabled(x.device.type)  # by autocast
        if self.wo.weight.is_floating_point() and not is_cast:  # it may be kept in float32, or quantized to integers
            x = x.to(self.wo.weight.dtype)
        return limit_float16(self.wo(x))


class T5DenseActDense(FeedForward):
    """Feed-forward network of T5 1.0: wo(act(wi(x))), with linear layers wi and wo and an activation function."""

    inner_layers = ("wi",)

    def inner(self, x: Tensor) -> Tensor:
        return self.act(limit_float16(self.wi(x)))


class T5DenseGatedActDense(FeedForward):
    """Gated feed-forward network of T5 1.1 (Shazeer 2020, arXiv 2002.05202): wo(act(wi_0(x)) * wi_1(x))."""

    inner_layers = ("wi_0", "wi_1")

    def inner(self, x: Tensor) -> Tensor:
        # Two products: after a single one, compiled, each element of the joined gradient would compute both halves.
        return self.act(limit_float16(self.wi_0(x))) * limit_float16(self.wi_1(x))


class T5Sublayer(nn.Module):
    """Base of T5's attention and feed-forward sublayers: a norm before and, with `post_norms`, one after."""

    def add_norms(self, config: T5Config) -> None:
        """Create the sublayer's norms; called after the other modules are created.

        So parameters have the same order as in transformers' state dicts.
        """
        self.layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        if config.post_norms:
            self.post_layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.has_post_norm = config.post_norms
        self.dropout = Dropout(config.dropout_rate)

    def added(self, x: Tensor, output: Tensor) -> Tensor:
        """Residual connection: x + output, where the output first goes through `post_layer_norm` if there is one."""
        output = self.post_layer_norm(output) if self.has_post_norm else output
        return limit_float16(x + self.dropout(output))


class T5LayerFF(T5Sublayer):
    """Feed-forward sublayer of T5 with its residual connection: x + feed-forward(norm(x))."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.DenseReluDense = (T5DenseGatedActDense if config.is_gated_act else T5DenseActDense)(config)
        self.add_norms(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x, self.DenseReluDense(self.layer_norm(x)))


class T5ClassificationHead(nn.Module):
    """Classification head out_proj(tanh(dense(x))), from d_model features to num_labels logits."""

    linear_layers = ("dense", "out_proj")

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.d_model, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dropout(torch.tanh(self.dense(self.dropout(x)))))


def window_of(config: T5Config, kind: str, layer_idx: int) -> tuple[int, int] | None:
    """Attention window of a layer with local attention: (tokens before, tokens after) a query.

    None for a layer without a window.

    Args:
        kind: kind of attention, as in `T5Attention`.
        layer_idx: number of the layer in its stack.
    """
    is_global = kind == DECODER_CROSS or (layer_idx + 1) % config.global_attn_every_n_layers == 0
    if is_global or config.local_attention is None:
        return None
    if kind == DECODER_SELF:
        return config.local_attention - 1, 0
    return config.local_attention, config.local_attention


def position_scheme(config: T5Config, kind: str, layer_idx: int) -> PositionScheme:
    """Create the positional encoding of one attention layer.

    It is `NoPosition` for cross-attention and for layers that use another layer's bias.

    Args:
        kind: kind of attention, as in `T5Attention`.
        layer_idx: number of the layer in its stack.
    """
    is_given = config.position_embedding_type == "relative_attention_bias" and config.shares_position_bias
    if kind == DECODER_CROSS or (is_given and layer_idx > 0):
        return NoPosition()
    return named_position(
        config,
        kind == ENCODER_SELF,
        head_dim=config.d_kv,
        max_distance=config.relative_attention_max_distance,
        rotary_base=config.rotary_base,
    )


class T5Attention(nn.Module):
    """Attention with T5's unscaled scores. Derive from it for a variant of your own, named in the configuration.

    Args:
        config: configuration of the encoder or decoder that the layer belongs to.
        kind: "encoder_self_attention", "decoder_self_attention" or "decoder_cross_attention".
        layer_idx: number of the layer in its encoder or decoder.
    """

    is_fast = False  # never of a class derived from it

    def __init__(self, config: T5Config, kind: str, layer_idx: int) -> None:
        super().__init__()
        self.config, self.kind, self.layer_idx = config, kind, layer_idx
        self.head_dim, self.dropout = config.d_kv, config.dropout_rate
        inner = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.num_key_value_heads = config.num_key_value_heads or config.num_heads
        self.k = nn.Linear(config.d_model, self.num_key_value_heads * config.d_kv, bias=False)
        self.v = nn.Linear(config.d_model, self.num_key_value_heads * config.d_kv, bias=False)
        self.window = window_of(config, kind, layer_idx)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        self.q_norm, self.k_norm = (
            T5LayerNorm(config.d_kv, config.layer_norm_epsilon) if config.qk_norm else None for _ in range(2)
        )
        position = position_scheme(config, kind, layer_idx)
        # The one scheme with parameters that transformers knows is found under transformers' name.
        self.position_name = "relative_attention_bias" if isinstance(position, RelativeBiasPosition) else "scheme"
        self.add_module(self.position_name, position)
        self.layout = layer_layout(config, layer_idx) if kind == ENCODER_SELF else None
        is_plain = not config.qk_norm and not rotates(position) and self.num_key_value_heads == config.num_heads
        self.is_packed = is_plain and kind != DECODER_CROSS  # q, k and v are views of one product

    @property
    def position(self) -> PositionScheme:
        return self._modules[self.position_name]

    @property
    def backend(self) -> str:
        """Name of the attention backend: "auto" with a block-sparse layout, otherwise by `attn_implementation`."""
        fused_on = self.o.weight.device if self.is_fast and self.training else None
        return "auto" if self.layout is not None else backend_of(self.config._attn_implementation, fused_on)

    @property
    def takes_segments(self) -> bool:
        """True if this layer can isolate the examples of packed rows by their segment IDs, without a mask.

        The backend must support segment IDs, and no variant may override attention.
        """
        is_plain = type(self).forward is T5Attention.forward and type(self).attend is T5Attention.attend
        return is_plain and (self.is_fast or self.backend == "auto")

    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        bias: Bias | None = None,
        key_value_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Bias | None, Tensor | None]:
        """Compute attention for B sequences with Q queries, K keys and D features.

        Args:
            x: normed hidden states [B, Q, D].
            spec: masks, causality and scale, the same for all layers.
            bias: position bias of an earlier layer, to be shared; None for this layer's own.
            key_value_states: the encoder's output [B, K, D] in cross-attention; None in self-attention.
            past_key_values: cache of a decoder; None for no cache.
            output_attentions: request the attention weights.

        Returns:
            The output [B, Q, D]; the position bias; and the attention weights [B, heads, Q, K] if requested or if the
            backend is "eager", else None.
        """
        offset = self.tokens_seen(past_key_values)
        states = x if key_value_states is None else key_value_states
        if self.is_fast and self.training and past_key_values is None:
            norms = self.q_norm, self.k_norm, None
            packed = joint_product(x, self.q, self.k, self.v) if self.is_packed else None
            features = self.projected(x, states) if packed is None else packed.chunk(3, dim=-1)
            if packed is not None and packed.dtype != torch.float16:  # which is clamped
                spec = spec._replace(packed=packed)
            q, k, v = map(self.split_heads, features, norms)
            if bias is None:  # else the scheme is one that adds, and the first layer is compiled as the others
                q, k = self.position.rotate(q, k)
        else:
            q = self.split_heads(self.q(x), self.q_norm)
            k, v, q = self.keys_and_values(q, states, past_key_values, offset)
        spec = self.own_spec(spec, q, k, offset)
        bias = self.position_bias(bias, q.shape[2], k.shape[2], offset, x.device)
        output, weights = self.attend(q, k, v, bias, spec, output_attentions)
        return self.join_heads(output), bias, weights

    def own_spec(self, spec: AttentionSpec, q: Tensor, k: Tensor, offset: int | Tensor) -> AttentionSpec:
        """Attention settings of this layer: `spec` with masks for cached tokens and for this layer's local window.

        Args:
            offset: number of cached tokens.
        """
        if self.kind == DECODER_SELF:
            spec = with_cache(spec, q.shape[2], k.shape[2], offset, q.device)
        if self.window is not None:
            spec = with_window(spec, self.window, (q.shape[2], k.shape[2]), offset, q.device)
        return spec

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Bias | None,
        spec: AttentionSpec,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention from queries, keys and values of heads.

        Returns:
            The output [batch, heads, queries, d_kv], and the attention weights or None.
        """
        lengths, groups = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        is_fast = self.is_fast and self.backend != "auto" and not output_attentions
        if is_fast and spec.segment_ids is not None and q.is_cpu and q.dtype != torch.float16:
            bias = spec.segment_ids.added_to(shared_bias(bias, *lengths, "eager"), spec.causal)
            spec = spec._replace(segment_ids=None, causal=False)
        if spec.bias is not None:  # a user's mask of floats
            bias = shared_bias(bias, *lengths, "eager")
            added = limit_float16(spec.bias.to(q.dtype))
            bias = added.expand(-1, -1, *lengths) if bias is None else bias + added
        if self.backend != "auto" or spec.mask is not None or output_attentions:
            bias = shared_bias(bias, *lengths, "eager")
        scale, softcap = float(self.config.attention_scale), self.config.attention_softcap
        spec = spec._replace(bias=bias, layout=self.layout, dropout_p=self.dropout if self.training else 0.0)
        spec = spec._replace(scale=scale, softcap=softcap)
        return attend(q, k, v, spec, self.backend, is_fast=is_fast, output_attentions=output_attentions)

    def projected(self, x: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Project x to queries, and `states` to keys and values: [batch, length, heads * d_kv] each."""
        if self.kind == DECODER_CROSS:
            return self.q(x), *joined(states, self.k, self.v)
        return joined(x, self.q, self.k, self.v)

    def split_heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Split features into heads: [batch, length, heads * d_kv] -> [batch, heads, length, d_kv].

        Args:
            norm: applied to the features of each head; None for no norm.
        """
        heads = limit_float16(x).unflatten(-1, (-1, self.head_dim))
        return (heads if norm is None else norm(heads).to(x.dtype)).transpose(1, 2)

    def join_heads(self, x: Tensor) -> Tensor:
        """Join the heads and apply the output projection: [batch, heads, length, d_kv] -> [batch, length, d_model]."""
        return limit_float16(self.o(x.transpose(1, 2).flatten(2)))

    def tokens_seen(self, past_key_values: Cache | None) -> int | Tensor:
        """Number of tokens in the cache before this call: an int, or a tensor for a static cache."""
        if past_key_values is None or self.kind == DECODER_CROSS:
            return 0
        seen = past_key_values.get_seq_length(self.layer_idx)
        return seen.clone() if isinstance(seen, Tensor) else seen

    def keys_and_values(
        self,
        q: Tensor,
        states: Tensor,
        past_key_values: Cache | None,
        offset: int | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute keys and values [batch, heads, keys, d_kv], including cached ones, and rotate queries by position.

        Args:
            states: hidden states to compute keys and values from; in cross-attention the encoder's, without positions.
            past_key_values: the cache, which is updated; None for no cache.
            offset: number of cached tokens.

        Returns:
            Keys, values and queries.
        """
        both, is_cross = isinstance(past_key_values, EncoderDecoderCache), self.kind == DECODER_CROSS
        if is_cross and both and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values, q
        k, v = self.split_heads(self.k(states), self.k_norm), self.split_heads(self.v(states))
        if not is_cross:
            q, k = self.position.rotate(q, k, offset)
        if is_cross and both:
            k, v = past_key_values.cross_attention_cache.update(k, v, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        elif past_key_values is not None and not is_cross:
            cache = past_key_values.self_attention_cache if both else past_key_values
            k, v = cache.update(k, v, self.layer_idx)
        return k, v, q

    def position_bias(
        self,
        bias: Bias | None,
        query_length: int,
        key_length: int,
        offset: int | Tensor,
        device: torch.device,
    ) -> Bias | None:
        """Position bias to add to the scores: the one shared by an earlier layer, otherwise this layer's own.

        Args:
            bias: the shared bias; None for this layer's own.
            offset: number of cached tokens.
        """
        if bias is None:
            bias = self.position.bias(query_length, key_length, offset, device)
        is_dense = self.layout is None
        return shared_bias(bias, query_length, key_length, self.backend, device, is_dense)


class T5CDQAttention(T5Attention):
    """Context-dependent queries: `num_cdq_heads` of the heads have queries that also depend on the whole input.

    It is the "cdQ" attention of t5-experiments, with its parameter names. A context-dependent head h pools the input's
    hidden states x (D features each) into one vector P_h, and computes each token's query q_h (d features) from both::

        P_h = softmax over tokens of T_h relu(W_t x)  times  x      [D], without padding
        q_h = cd_q cd_w [P_h; x]                                    [d]

    T_h, W_t, cd_q and cd_w are learned matrices. Other heads are unchanged. If half of the heads are
    context-dependent, both halves share keys, values and bias.

    `num_cdq_heads` is half of `num_heads`, all, or 0.

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


def make_attention(config: T5Config, kind: str, layer_idx: int) -> T5Attention:
    """Create an attention layer of the class that the configuration names for this kind of attention.

    Args:
        kind: kind of attention, as in `T5Attention`.
    """
    key = f"{kind}_layer"
    name = getattr(config, key)
    return resolve_configured(name, T5Attention, f"{key}={name!r}")(config, kind, layer_idx)


class T5LayerAttention(T5Sublayer):
    """Base of T5's attention sublayers, which compute x + attention(norm(x)).

    `attention_name` is the name of the attention module in state dicts.
    """

    attention_name: ClassVar[str]

    def __init__(self, config: T5Config, kind: str, layer_idx: int) -> None:
        super().__init__()
        self.add_module(self.attention_name, make_attention(config, kind, layer_idx))
        self.add_norms(config)

    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        bias: Bias | None,
        past_key_values: Cache | None,
        output_attentions: bool,
        key_value_states: Tensor | None = None,
    ) -> tuple[Tensor, Bias | None, Tensor | None]:
        attention = self._modules[self.attention_name]
        output, bias, weights = attention(
            self.layer_norm(x), spec, bias, key_value_states, past_key_values, output_attentions
        )
        return self.added(x, output), bias, weights


class T5LayerSelfAttention(T5LayerAttention):
    """Self-attention sublayer of T5, with its norm and residual connection."""

    attention_name = "SelfAttention"


class T5LayerCrossAttention(T5LayerAttention):
    """Cross-attention sublayer of T5's decoder, with its norm and residual connection."""

    attention_name = "EncDecAttention"


class T5Block(GradientCheckpointingLayer):
    """One transformer layer of T5: self-attention, in a decoder cross-attention, and feed-forward.

    The forward pass returns hidden states and the position bias for the next layer.
    """

    def __init__(self, config: T5Config, layer_idx: int) -> None:
        super().__init__()
        kind = DECODER_SELF if config.is_decoder else ENCODER_SELF
        self.layer = nn.ModuleList([T5LayerSelfAttention(config, kind, layer_idx)])
        if config.is_decoder:
            self.layer.append(T5LayerCrossAttention(config, DECODER_CROSS, layer_idx))
        self.layer.append(T5LayerFF(config))

    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        bias: Bias | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_spec: AttentionSpec | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Bias | None]:
        x, bias, _ = self.layer[0](x, spec, bias, past_key_values, output_attentions)
        if encoder_hidden_states is not None:
            x, _, _ = self.layer[1](x, encoder_spec, None, past_key_values, output_attentions, encoder_hidden_states)
        return self.layer[-1](x), bias
