"""The layers of BERT, in the order in which a batch passes through them, with the module names of transformers' BERT.

Shapes: B sequences, L tokens, D features (`hidden_size`), H heads of d = D / H features each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GradientCheckpointingLayer, apply_chunking_to_forward
from transformers.activations import ACT2FN

from lm_experiments_tools.attention.huggingface import layer_layout
from lm_experiments_tools.attention.kernels.bias import Bias, shared_bias
from lm_experiments_tools.attention.kernels.call import AttentionSpec, attend, backend_of
from lm_experiments_tools.attention.layouts import SparsityConfig
from lm_experiments_tools.attention.positions import PositionScheme, RotaryPosition, rotates
from lm_experiments_tools.attention.segments import Segments, positions_of
from lm_experiments_tools.modules.fast_step import Dropout, joint_product, normed, stream_dtype
from modeling_bert.configuration_bert import BertConfig
from modeling_bert.positions import content_position, local_position, shared_position, window_bias, window_layout


class CanBeFast(nn.Module):
    """Mixin of modules that have a fused (faster) path for training, which `use_fast_step` enables."""

    is_fast = False

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return normed(norm, x) if self.is_fast else norm(x)


class BertEmbeddings(CanBeFast):
    """Input embeddings of BERT: the sum of token, token type and position embeddings, followed by a norm.

    Position embeddings exist only if `position_embedding_type` is "absolute".
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.position_embedding_type == "absolute"
            else None
        )
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.LayerNorm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Add token types and positions to word embeddings [batch, length, features].

        Token types [batch, length] default to 0, positions to 0..length - 1.
        """
        x = inputs_embeds
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(inputs_embeds.shape[:-1], dtype=torch.long, device=inputs_embeds.device)
            x = x + self.token_type_embeddings(token_type_ids)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(x.shape[1], device=x.device)[None]
            x = x + self.position_embeddings(position_ids)
        x = self.LayerNorm(x)
        return self.dropout(x.to(stream_dtype(x)) if self.is_fast else x)


class BertSelfAttention(CanBeFast):
    """Multi-head self-attention of BERT, without the output projection."""

    def __init__(self, config: BertConfig, layout: SparsityConfig | None) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.num_heads = config.num_attention_heads
        if config.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={self.num_heads}."
            )
        self.head_dim = config.hidden_size // self.num_heads
        self.group_size = self.num_heads // (config.num_key_value_heads or self.num_heads)
        width, shared = config.hidden_size, config.hidden_size // self.group_size
        self.query = nn.Linear(width, width, bias=config.attention_bias)
        self.key = nn.Linear(width, shared, bias=config.attention_bias)
        self.value = nn.Linear(width, shared, bias=config.attention_bias)
        self.distance_embedding = content_position(config)

    def forward(
        self,
        x: Tensor,
        bias: Bias | None,
        spec: AttentionSpec,
        position: PositionScheme,
        offset: int | Tensor,
        output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention for hidden states x [batch, length, features].

        Args:
            bias: position bias of the scores; None for none.
            spec: masks, layout and settings, the same for all layers.
            position: positional encoding that rotates queries and keys.
            offset: see `PositionScheme.rotate`.

        Returns:
            The output [batch, length, features], and the attention weights [batch, heads, length, length] or None.
        """
        projections = self.query, self.key, self.value
        packed = joint_product(x, *projections) if self.is_fast and self.training else None
        if packed is None:
            features = [part(x) for part in projections]
        else:
            features = packed.split([part.weight.shape[0] for part in projections], dim=-1)
            if self.group_size == 1 and not rotates(position):
                spec = spec._replace(packed=packed)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in features)  # [B, H, L, d]
        q, k = position.rotate(q, k, offset)
        if self.group_size > 1:
            k, v = (part.repeat_interleave(self.group_size, dim=1) for part in (k, v))
        if self.distance_embedding is not None:
            of_content = self.distance_embedding(q, k)
            bias = of_content if bias is None else of_content + bias
        dropout_p = self.config.attention_probs_dropout_prob if self.training else 0.0
        backend = backend_for(self.config, x.device if self.is_fast and self.training else None)
        output, weights = attend(
            q,
            k,
            v,
            spec._replace(bias=bias, layout=self.layout or spec.layout, dropout_p=dropout_p),
            backend,
            is_fast=self.is_fast and backend == "sdpa",
            output_attentions=output_attentions,
        )
        return output.transpose(1, 2).flatten(2), weights


class BertResidual(CanBeFast):
    """Last step of attention and of the feed-forward network: linear layer, residual connection and norm.

    The linear layer projects to D (`hidden_size`) features. With `pre_layer_norm` there is no norm here.
    """

    def __init__(self, config: BertConfig, width: int, bias: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size, bias=bias)
        self.LayerNorm = nn.Identity() if config.pre_layer_norm else make_norm(config)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.LayerNorm, self.dropout(self.dense(x)) + residual)


class BertAttention(nn.Module):
    """Attention with its residual connection, under the module names of BERT checkpoints."""

    def __init__(self, config: BertConfig, layout: SparsityConfig | None) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layout)
        self.output = BertResidual(config, config.hidden_size, config.attention_bias)


class BertIntermediate(nn.Module):
    """First linear layer and activation of the feed-forward network.

    With `gated_mlp` the weight's first half is activated, and the second half is the gate.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.is_gated = config.gated_mlp
        width = config.intermediate_size * (2 if self.is_gated else 1)
        self.dense = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.activation(self.dense(x))
        activated, gate = self.dense(x).chunk(2, dim=-1)
        return self.activation(activated) * gate


class BertLayer(CanBeFast, GradientCheckpointingLayer):
    """A transformer layer: attention and feed-forward network, each with a residual connection and a norm.

    The norms come after the residual connections or, with `pre_layer_norm`, before attention and feed-forward. The
    latter norms have the names of t5-experiments, as in its GENA-LM checkpoints.
    """

    def __init__(self, config: BertConfig, number: int) -> None:
        super().__init__()
        self.config = config
        is_normed = config.pre_layer_norm and (number > 0 or config.first_attention_norm)
        self.pre_attention_ln = make_norm(config) if is_normed else nn.Identity()
        self.attention = BertAttention(config, layer_layout(config, number))
        self.post_attention_ln = make_norm(config) if config.pre_layer_norm else nn.Identity()
        self.intermediate = BertIntermediate(config)
        self.output = BertResidual(config, config.intermediate_size, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        bias: Bias | None,
        spec: AttentionSpec,
        position: PositionScheme,
        offset: int | Tensor,
        output_attentions: bool,
    ) -> Tensor:
        attended, _ = self.attention.self(
            self.norm(self.pre_attention_ln, x), bias, spec, position, offset, output_attentions
        )
        x = self.attention.output(attended, x)
        return apply_chunking_to_forward(self.feed_forward, self.config.chunk_size_feed_forward, 1, x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward network and its residual connection to each token."""
        return self.output(self.intermediate(self.norm(self.post_attention_ln, x)), x)


class BertEncoder(nn.Module):
    """All transformer layers of BERT.

    Position biases are computed once for all layers with full attention, and once for those with a sliding window.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.position = shared_position(config)
        self.local_position = local_position(config)
        self.local_layout = window_layout(config)
        self.layer = nn.ModuleList(BertLayer(config, number) for number in range(config.num_hidden_layers))
        final_norm = config.pre_layer_norm and config.last_layer_norm
        self.last_layer_ln = make_norm(config) if final_norm else nn.Identity()

    def forward(self, x: Tensor, spec: AttentionSpec, offset: int | Tensor, output_attentions: bool) -> Tensor:
        """Apply all layers to hidden states x [batch, length, features].

        Args:
            spec: masks, layout and settings of attention, the same for all layers.
            offset: see `PositionScheme.rotate`.
        """
        length = x.shape[1]
        spec = spec._replace(causal=self.config.is_decoder)
        whole = self.position, *self._bias(self.position.bias(length, length, device=x.device), x, spec)
        local = whole
        if self.local_position is not None:
            skips_blocks = self._backend(x) == "auto"
            bias, of_local = self._bias(window_bias(self.config, skips_blocks, x), x, spec, is_local=True)
            local = self.local_position, bias, of_local._replace(layout=self.local_layout if skips_blocks else None)
        types = self.config.layer_types or ["full_attention"] * len(self.layer)
        for layer, kind in zip(self.layer, types, strict=True):
            position, bias, of_kind = local if kind == "sliding_attention" else whole
            # reentrant checkpoints need the bias as an argument of its own
            x = layer(x, bias, of_kind, position, offset, output_attentions)
        return self.last_layer_ln(x)

    def _backend(self, x: Tensor) -> str:
        return backend_for(self.config, x.device if self.layer[0].is_fast and self.training else None)

    def _bias(
        self, bias: Bias | None, x: Tensor, spec: AttentionSpec, is_local: bool = False
    ) -> tuple[Bias | None, AttentionSpec]:
        """The bias that layers of a kind share, and their spec, in which it may have replaced the segment IDs."""
        length, backend = x.shape[1], self._backend(x)
        bias_backend = backend if spec.mask is None else "sdpa"  # under a mask of queries by keys all is dense
        is_dense = self.config.sparse_config_cls is None and not is_local
        bias = shared_bias(bias, length, length, bias_backend, x.device, is_dense)
        if spec.segment_ids is not None and backend != "auto":  # documents separated by the bias, for all layers
            queries, keys = spec.segment_ids
            same = queries[:, None, :, None] == keys[:, None, None, :]
            mask = torch.zeros(same.shape, dtype=x.dtype, device=same.device).masked_fill(~same, -torch.inf)
            bias, spec = mask if bias is None else bias + mask, spec._replace(segment_ids=None)
        return bias, spec


def backend_for(config: BertConfig, fused_on: torch.device | None = None) -> str:
    """Name of a model's attention backend: "auto" with a block-sparse layout, otherwise by `attn_implementation`.

    Args:
        fused_on: the model's device if it trains by its fused path, else None.
    """
    return "auto" if config.sparse_config_cls is not None else backend_of(config._attn_implementation, fused_on)


def make_norm(config: BertConfig) -> nn.LayerNorm | nn.RMSNorm:
    """Create a norm over `hidden_size` features, of the type that the configuration names."""
    if config.norm_type == "rms_norm":
        return nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


def spec_of_packed_rows(
    segment_ids: Tensor, spec: AttentionSpec, config: BertConfig, position: PositionScheme
) -> tuple[AttentionSpec, int | Tensor]:
    """Attention settings for packed rows, and each token's position offset for `PositionScheme.rotate`.

    Masked tokens are treated as padding.

    Args:
        segment_ids: document ID of each token, int [batch, length].
        spec: the masks of the call.
        position: the layers' positional encoding; only rotary ones need offsets.

    Raises:
        ValueError: a block-sparse layout, or a mask other than [batch, length].
    """
    if config.sparse_config_cls is not None:
        raise ValueError(
            f"sparse_config_cls={config.sparse_config_cls!r} lays its blocks over the row, so what a document of a "
            "packed row (segment_ids) looks at would depend on its place."
        )
    if spec.mask is not None:
        raise ValueError("segment_ids and an attention_mask of more than [batch, length]: give one of the two.")
    offset = 0
    if isinstance(position, RotaryPosition):
        offset = (positions_of(segment_ids) - torch.arange(segment_ids.shape[1], device=segment_ids.device))[:, None]
    if spec.key_padding_mask is not None:
        segment_ids = segment_ids.masked_fill(~spec.key_padding_mask, 0)
    return AttentionSpec(segment_ids=Segments(segment_ids, segment_ids)), offset


def of_documents(segment_ids: Tensor | None, labels: Tensor | None) -> dict[str, Any]:
    """Arguments `segment_ids` and `num_segments` of `BertModel.forward` for packed rows; none if rows are not packed.

    Args:
        segment_ids: document ID of each token, [batch, length]; None for rows that are not packed.
        labels: [batch, documents, ...], a label for each document, which gives the number of documents; or None.

    Raises:
        ValueError: labels have no dimension for documents.
    """
    if segment_ids is None:
        return {}
    if labels is not None and labels.dim() < 2:
        raise ValueError(f"labels are {list(labels.shape)}: those of packed rows are [batch, documents of a row].")
    return {"segment_ids": segment_ids, "num_segments": None if labels is None else labels.shape[1]}
