"""The maths of BERT, in the order in which a batch passes through it. Modules carry the names of transformers' BERT.

Shapes: B sequences, L tokens, D features (`hidden_size`), H heads of d = D / H features each.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from transformers import GradientCheckpointingLayer, apply_chunking_to_forward
from transformers.activations import ACT2FN

from lm_experiments_tools.attention.huggingface import configured_layout
from lm_experiments_tools.attention.kernels.bias import Bias
from lm_experiments_tools.attention.kernels.choice import shared_bias
from lm_experiments_tools.attention.kernels.dispatch import attend, backend_of
from lm_experiments_tools.attention.kernels.spec import AttentionSpec
from lm_experiments_tools.attention.layouts import SparsityConfig
from lm_experiments_tools.attention.positions import PositionScheme
from lm_experiments_tools.modules.fast_step import dropped, joined, normed, stream_dtype
from modeling_bert.configuration_bert import BertConfig
from modeling_bert.positions import content_position, shared_position


class CanBeFast(nn.Module):
    """A part with a quicker way to the same numbers in training, which `use_fast_step` switches on."""

    is_fast = False

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return normed(norm, x) if self.is_fast else norm(x)

    def drop(self, dropout: nn.Dropout, x: Tensor) -> Tensor:
        if self.is_fast and self.training and type(dropout) is nn.Dropout:
            return dropped(x, dropout.p)
        return dropout(x)


class BertEmbeddings(CanBeFast):
    """Tokens, token types and, for "absolute" positions, positions: added up and normed."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.position_embedding_type == "absolute"
            else None
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Embeddings [B, L, D] from those of the words alone; types are 0 and positions 0..L-1 unless given [B, L]."""
        if token_type_ids is None:
            token_type_ids = torch.zeros(inputs_embeds.shape[:-1], dtype=torch.long, device=inputs_embeds.device)
        x = inputs_embeds + self.token_type_embeddings(token_type_ids)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(x.shape[1], device=x.device)[None]
            x = x + self.position_embeddings(position_ids)
        x = self.LayerNorm(x)
        return self.drop(self.dropout, x.to(stream_dtype(x)) if self.is_fast else x)


class BertSelfAttention(CanBeFast):
    """Attention of each token to all that it may see; positions and sparsity are arguments, not branches."""

    def __init__(self, config: BertConfig, layout: SparsityConfig | None) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.num_heads = config.num_attention_heads
        if config.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={self.num_heads}."
            )
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
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
        """[B, L, D] -> [B, L, D] and, on request, the weights [B, H, L, L]; `offset` is for `position.rotate`."""
        projections = self.query, self.key, self.value
        features = joined(x, *projections) if self.is_fast and self.training else (part(x) for part in projections)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in features)  # [B, H, L, d]
        q, k = position.rotate(q, k, offset)
        if self.distance_embedding is not None:
            of_content = self.distance_embedding(q, k)
            bias = of_content if bias is None else of_content + bias
        dropout_p = self.config.attention_probs_dropout_prob if self.training else 0.0
        backend = backend_for(self.config)
        output, weights = attend(
            q,
            k,
            v,
            spec._replace(bias=bias, layout=self.layout, dropout_p=dropout_p),
            backend,
            prefers_products=self.is_fast and backend == "sdpa",
            output_attentions=output_attentions,
        )
        return output.transpose(1, 2).flatten(2), weights


class BertResidual(CanBeFast):
    """Back to D features, onto the residual stream; the sum is normed, unless `pre_layer_norm` norms elsewhere."""

    def __init__(self, config: BertConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.Identity() if config.pre_layer_norm else _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.LayerNorm, self.drop(self.dropout, self.dense(x)) + residual)


class BertAttention(nn.Module):
    """Gives attention and its residual connection the names that checkpoints have."""

    def __init__(self, config: BertConfig, layout: SparsityConfig | None) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layout)
        self.output = BertResidual(config, config.hidden_size)


class BertIntermediate(nn.Module):
    """The wide half of the feed-forward network."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class BertLayer(CanBeFast, GradientCheckpointingLayer):
    """Attention and feed-forward, with norms in front of them (`pre_layer_norm`) or behind their sums.

    The norms in front have the names of t5-experiments, which the GENA-LM checkpoints made with it carry.
    """

    def __init__(self, config: BertConfig, layout: SparsityConfig | None) -> None:
        super().__init__()
        self.config = config
        self.pre_attention_ln = _norm(config) if config.pre_layer_norm else nn.Identity()
        self.attention = BertAttention(config, layout)
        self.post_attention_ln = _norm(config) if config.pre_layer_norm else nn.Identity()
        self.intermediate = BertIntermediate(config)
        self.output = BertResidual(config, config.intermediate_size)

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
        """[B, L, D] -> [B, L, D], each token by itself."""
        return self.output(self.intermediate(self.norm(self.post_attention_ln, x)), x)


class BertEncoder(nn.Module):
    """All layers, and what they share: the position scheme, whose bias is made once."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.position = shared_position(config)
        self.layer = nn.ModuleList(BertLayer(config, layout) for layout in _layouts(config))
        final_norm = config.pre_layer_norm and config.last_layer_norm
        self.last_layer_ln = _norm(config) if final_norm else nn.Identity()

    def forward(self, x: Tensor, spec: AttentionSpec, offset: int | Tensor, output_attentions: bool) -> Tensor:
        """[B, L, D] -> [B, L, D]"""
        length, backend = x.shape[1], backend_for(self.config)
        bias = self.position.bias(length, length, device=x.device)
        bias_backend = backend if spec.mask is None else "sdpa"  # under a mask of queries by keys all is dense
        is_dense = self.config.sparse_config_cls is None
        bias = shared_bias(bias, length, length, bias_backend, x.device, is_dense, self.training)
        if spec.segment_ids is not None and backend != "auto":  # documents separated by the bias, for all layers
            queries, keys = spec.segment_ids
            same = queries[:, None, :, None] == keys[:, None, None, :]
            mask = torch.zeros(same.shape, dtype=x.dtype, device=same.device).masked_fill(~same, -torch.inf)
            bias, spec = mask if bias is None else bias + mask, spec._replace(segment_ids=None)
        for layer in self.layer:  # reentrant checkpoints need the bias as an argument of its own
            x = layer(x, bias, spec, self.position, offset, output_attentions)
        return self.last_layer_ln(x)


def backend_for(config: BertConfig) -> str:
    """The attention backend: "auto" where there is a layout, else that of attn_implementation."""
    return "auto" if config.sparse_config_cls is not None else backend_of(config._attn_implementation)


def _norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _layouts(config: BertConfig) -> list[SparsityConfig | None]:
    """The layout of each layer: one for all, unless it has random blocks, which each layer draws for itself."""
    layout = configured_layout(config)
    if layout is not None and layout.num_heads != config.num_attention_heads:
        raise ValueError(
            f"sparse_attention is for num_heads={layout.num_heads}, but num_attention_heads is "
            f"{config.num_attention_heads}: leave num_heads out of sparse_attention."
        )
    if layout is None or not layout.uses_random_blocks:
        return [layout] * config.num_hidden_layers
    return [
        dataclasses.replace(layout, layer_idx=layout.layer_idx + number) for number in range(config.num_hidden_layers)
    ]
