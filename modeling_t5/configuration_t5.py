"""Configuration of T5: transformers' settings, and those of this package's variants, off by default."""

import dataclasses
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from lm_experiments_tools.modules.variants import VariantConfig

POSITIONS = ("relative_attention_bias", "rotary", "alibi", "none")


@strict
class T5Config(VariantConfig, transformers.T5Config):
    """Configuration of T5: transformers' T5Config with further keys for variants; docs/models.md links the papers.

    `tie_word_embeddings` False gives the output layer its own matrix and does not scale its input (T5 1.1, mT5, FLAN,
    UL2); True shares the embedding matrix (T5 1.0). transformers 5 always sets it to True.

    Args:
        position_embedding_type: "relative_attention_bias" (T5's), "rotary", "alibi", "none", or a class of yours,
            "module:Class", called with (config, bidirectional) for each layer of self-attention; it derives from
            `lm_experiments_tools.attention.positions.PositionScheme`.
        relative_attention_bias_per_layer: a bias for each layer (as in umT5) instead of one for all layers of the
            encoder and one for all of the decoder.
        rotary_dim: number of features of a head that "rotary" rotates, the first ones; all if None.
        rotary_base: `base` of `RotaryPosition` for "rotary".
        encoder_self_attention_layer, decoder_self_attention_layer, decoder_cross_attention_layer: the class of each
            kind of attention, "module:Class", called with (config, kind, layer_idx); see `layers.T5Attention`.
        num_cdq_heads: heads of `T5CDQAttention` with context-dependent queries: half of num_heads, or all of them.
        num_key_value_heads: heads of keys and values, each shared by a group of query heads (grouped-query attention,
            arXiv 2305.13245); num_heads if None.
        attention_scale: factor of scores before softmax; 1 is T5's.
        attention_softcap, final_softcap: bound c of attention scores and of logits, which become c * tanh(x / c)
            (Gemma 2, arXiv 2408.00118).
        local_attention: window w of local self-attention layers in tokens: w - 1 before a decoder's token, w before
            and after an encoder's. None: all layers are global.
        qk_norm: apply a norm to each head of queries and keys (Gemma 3).
        global_attn_every_n_layers: every n-th layer is global, the others are local.
        post_norms: also normalize the output of each attention and feed-forward before the residual connection.
        scale_embeddings: multiply embeddings by sqrt(d_model).
        separate_encoder_embeddings: give the encoder its own embedding matrix (T5Gemma, arXiv 2504.06225).
        num_memory_tokens: number of learned vectors before the encoder's input, which all layers and the decoder
            attend to.
        sparse_config_cls, sparse_attention: name and settings of a block-sparse layout of the encoder, e.g. "BigBird"
            and `{"block": 64}` (`lm_experiments_tools.attention.layouts`); DeepSpeed's names are understood.
        keep_in_fp32: parts of module names whose weights `from_pretrained(dtype=torch.float16)` leaves in float32.
        fp32_residual: keep the hidden states between layers in float32 if weights are float16 or bfloat16.
        z_loss: weight of log(Z)^2 in the loss, Z the softmax's denominator (1e-4 in T5X).
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        cross_entropy_chunk_size: compute the loss for this many target tokens at a time, so that full logits never
            exist in training; 0 for all tokens at once. `return_logits` of `forward` overrides whether logits are
            returned.

    Raises:
        ValueError: settings are unknown, out of range, or exclude each other.
        StrictDataclassError: a setting has another type. Annotations are no strings here: `strict` skips those.
    """

    variant_type = "lm_experiments_t5"
    variant_keys = (
        "position_embedding_type",
        "relative_attention_bias_per_layer",
        "encoder_self_attention_layer",
        "decoder_self_attention_layer",
        "decoder_cross_attention_layer",
        "num_memory_tokens",
        "sparse_config_cls",
        "num_key_value_heads",
        "attention_scale",
        "attention_softcap",
        "final_softcap",
        "local_attention",
        "qk_norm",
        "post_norms",
        "scale_embeddings",
        "separate_encoder_embeddings",
    )

    position_embedding_type: str = "relative_attention_bias"
    relative_attention_bias_per_layer: bool = False
    rotary_dim: int | None = None
    rotary_base: float | int = 10000.0
    encoder_self_attention_layer: str = "modeling_t5:T5Attention"
    decoder_self_attention_layer: str = "modeling_t5:T5Attention"
    decoder_cross_attention_layer: str = "modeling_t5:T5Attention"
    num_cdq_heads: int = 0
    num_key_value_heads: int | None = None
    attention_scale: float | int = 1.0
    attention_softcap: float | int | None = None
    final_softcap: float | int | None = None
    local_attention: int | None = None
    qk_norm: bool = False
    global_attn_every_n_layers: int = 2
    post_norms: bool = False
    scale_embeddings: bool = False
    separate_encoder_embeddings: bool = False
    num_memory_tokens: int = 0
    sparse_config_cls: str | None = None
    sparse_attention: dict | None = None
    keep_in_fp32: list[str] | tuple[str, ...] = dataclasses.field(default_factory=lambda: ["wo"])
    fp32_residual: bool = False
    z_loss: float | int = 0.0
    label_smoothing: float | int = 0.0
    cross_entropy_chunk_size: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        tied = kwargs.get("tie_word_embeddings")
        if not (tied is None or isinstance(tied, bool)):
            raise ValueError(f"tie_word_embeddings={tied!r} must be true or false.")
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = tied is not False
        self._check_sizes()
        if self.dense_act_fn not in ACT2FN:
            raise ValueError(f"feed_forward_proj={self.feed_forward_proj!r} names no activation of transformers.")
        if self.num_cdq_heads not in (0, self.num_heads, self.num_heads / 2):
            raise ValueError(
                f"num_cdq_heads={self.num_cdq_heads} must be 0, half of num_heads={self.num_heads}, or all of them: "
                "regular and context-dependent heads share keys and values in pairs."
            )
        kinds = ("encoder_self_attention", "decoder_self_attention", "decoder_cross_attention")
        layers = (getattr(self, f"{kind}_layer") for kind in kinds)
        if self.num_cdq_heads and all(layer == "modeling_t5:T5Attention" for layer in layers):
            raise ValueError(
                f"num_cdq_heads={self.num_cdq_heads} is of T5CDQAttention: give encoder_self_attention_layer as "
                '"modeling_t5:T5CDQAttention" too.'
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1.")
        if self.num_key_value_heads is not None and self.num_cdq_heads:
            raise ValueError("num_cdq_heads and num_key_value_heads exclude each other: leave one out.")
        if self.sparse_config_cls is not None and (self.attention_softcap or self.local_attention):
            raise ValueError("sparse_config_cls has neither attention_softcap nor local_attention: leave them out.")
        if self.num_memory_tokens and self.local_attention:
            raise ValueError("num_memory_tokens and local_attention exclude each other: a window hides the memory.")
        if self.final_softcap is not None and self.cross_entropy_chunk_size:
            raise ValueError("cross_entropy_chunk_size knows no final_softcap: set it to 0.")
        for name in ("attention_scale", "attention_softcap", "final_softcap", "local_attention"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")

    @property
    def shares_position_bias(self) -> bool:
        """True if all layers of an encoder or decoder use the position bias of the first layer."""
        return not self.relative_attention_bias_per_layer and ":" not in self.position_embedding_type

    def get_text_config(self, *args: Any, **kwargs: Any) -> transformers.PreTrainedConfig:
        """Configuration of the encoder or decoder, which `generate` reads.

        Unlike in transformers, the decoder's configuration has the decoder's number of layers.
        """
        config = super().get_text_config(*args, **kwargs)
        decoder = args[0] if args else kwargs.get("decoder")
        if decoder and config is not self:  # a copy, which transformers makes of an encoder-decoder's
            config.num_layers = self.num_decoder_layers
        return config

    def _check_sizes(self) -> None:
        counts = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads")
        self.check_variant(POSITIONS, (*counts, "global_attn_every_n_layers"))
        for name in ("num_cdq_heads", "num_memory_tokens", "cross_entropy_chunk_size", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
