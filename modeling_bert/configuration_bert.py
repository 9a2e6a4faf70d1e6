"""Configuration of BERT: transformers' settings, and those of this package's variants, off by default."""

from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from lm_experiments_tools.modules.variants import VariantConfig

POSITIONS = ("absolute", "relative_key", "relative_key_query", "relative_attention_bias", "rotary", "alibi", "none")
NORMS = ("layer_norm", "rms_norm")
LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class BertConfig(VariantConfig, transformers.BertConfig):
    """Configuration of BERT: transformers' BertConfig with further keys for variants of the model.

    Args:
        pre_layer_norm: normalize the inputs of attention and feed-forward (Xiong et al. 2020, arXiv 2002.04745)
            instead of the sums after them.
        last_layer_norm: with pre_layer_norm, normalize the output of the last layer.
        position_embedding_type: "absolute" (Devlin et al. 2018), "relative_key" (Shaw et al. 2018, arXiv 1803.02155),
            "relative_key_query" (Huang et al. 2020, method 4, arXiv 2009.13658), "relative_attention_bias" (a T5 bias
            shared by all layers), "rotary", "alibi", "none", or a class of yours, "module:Class", a
            `lm_experiments_tools.attention.positions.PositionScheme` made as Class(config, bidirectional). Only
            "absolute" has position embeddings.
        relative_attention_num_buckets, relative_last_bucket_distance: settings of "relative_attention_bias"; T5's are
            32 and 128.
        rotary_dim: number of features of a head that "rotary" rotates, the first ones; all if None.
        rotary_base: `base` of `RotaryPosition`, for "rotary".
        norm_type: "layer_norm", or "rms_norm" (Zhang and Sennrich 2019, arXiv 1910.07467); it holds for all norms.
        norm_bias: give layer norms a bias; RMSNorm has none.
        attention_bias, mlp_bias: give a bias to the linear layers of attention, and to those of the feed-forward
            network.
        gated_mlp: gate the feed-forward network: activation(x W) * (x V), e.g. GeGLU with hidden_act "gelu" and SwiGLU
            with "silu" (Shazeer 2020, arXiv 2002.05202). `intermediate_size` is the width of each half.
        embedding_norm: normalize the embeddings.
        first_attention_norm: with pre_layer_norm, normalize the input of the first attention; not needed after
            `embedding_norm`.
        num_key_value_heads: heads of keys and values, each shared by a group of query heads (Ainslie et al. 2023,
            arXiv 2305.13245); None for `num_attention_heads`.
        layer_types: "full_attention" or "sliding_attention" for each layer (transformers' names); None for full.
        local_attention: window of "sliding_attention" in tokens, half of it on each side.
        local_rotary_base: `rotary_base` of "sliding_attention" layers; None for the same.
        head_transform: put a linear layer and a norm before the MLM head's output layer.
        classifier_bias, decoder_bias: give a bias to that linear layer, and to the output layer.
        is_decoder: causal attention, for language modeling from left to right.
        sparse_config_cls, sparse_attention: name and settings of a block-sparse layout, e.g. "BigBird" and `{"block":
            64}` (`lm_experiments_tools.attention.layouts`); DeepSpeed's names are understood.

    Raises:
        ValueError: settings are unknown, out of range, or exclude each other.
        StrictDataclassError: a setting has another type. Annotations are no strings here: `strict` skips those.
    """

    variant_type = "lm_experiments_bert"
    variant_keys = (
        "pre_layer_norm", "position_embedding_type", "sparse_config_cls", "norm_type", "norm_bias", "attention_bias",
        "mlp_bias", "gated_mlp", "embedding_norm", "num_key_value_heads", "layer_types", "head_transform",
        "classifier_bias", "decoder_bias", "is_decoder",
    )  # fmt: skip

    pre_layer_norm: bool = False
    last_layer_norm: bool = True
    position_embedding_type: str = "absolute"
    relative_attention_num_buckets: int = 32
    relative_last_bucket_distance: int = 128
    rotary_dim: int | None = None
    rotary_base: float | int = 10000.0
    norm_type: str = "layer_norm"
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    gated_mlp: bool = False
    embedding_norm: bool = True
    first_attention_norm: bool = True
    num_key_value_heads: int | None = None
    layer_types: list[str] | None = None
    local_attention: int | None = None
    local_rotary_base: float | int | None = None
    head_transform: bool = True
    classifier_bias: bool = True
    decoder_bias: bool = True
    sparse_config_cls: str | None = None
    sparse_attention: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._check_sizes()
        if self.add_cross_attention:
            raise ValueError("add_cross_attention is for decoders, but this BERT is an encoder.")
        if not (self.last_layer_norm or self.pre_layer_norm):
            raise ValueError(
                "last_layer_norm=False goes with pre_layer_norm=True; otherwise each layer has its norms."
            )
        self._check_layers()

    def _check_layers(self) -> None:
        if self.norm_type not in NORMS:
            raise ValueError(f"norm_type={self.norm_type!r} is none of {', '.join(NORMS)}.")
        if not (self.first_attention_norm or self.pre_layer_norm):
            raise ValueError("first_attention_norm=False goes with pre_layer_norm=True.")
        types = self.layer_types or []
        if self.layer_types is not None and (len(types) != self.num_hidden_layers or {*types} - {*LAYER_TYPES}):
            raise ValueError(
                f"layer_types={types} must be {self.num_hidden_layers} values (num_hidden_layers), each of "
                f"{' or '.join(LAYER_TYPES)}."
            )
        local = "sliding_attention" in types
        if local != (self.local_attention is not None) or (local and self.local_attention < 2):
            raise ValueError(
                f"local_attention={self.local_attention} must be the window of layers of layer_types "
                '"sliding_attention", at least 2 tokens; without such layers leave it out.'
            )
        if self.local_rotary_base is not None and (not local or self.position_embedding_type != "rotary"):
            raise ValueError('local_rotary_base is of "sliding_attention" layers with "rotary" positions.')
        if local and (
            self.sparse_config_cls is not None or self.position_embedding_type not in ("absolute", "rotary", "none")
        ):
            raise ValueError(
                "sliding_attention goes with absolute, rotary or no positions, and without sparse_config_cls."
            )

    @property
    def is_variant(self) -> bool:
        """True if a BertModel of transformers with this configuration would compute something else, or fail.

        It would fail without token types, which transformers' model always has.
        """
        return super().is_variant or self.type_vocab_size == 0

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        self.check_variant(POSITIONS, (*sizes, "max_position_embeddings"))
        if self.type_vocab_size < 0:
            raise ValueError(f"type_vocab_size={self.type_vocab_size} must be at least 0, which is no embedding.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1.")
        if isinstance(self.hidden_act, str) and self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} names no activation of transformers.")
