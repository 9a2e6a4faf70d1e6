"""The settings of BERT: transformers' own, and those of this package's variants, which are off by default."""

from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from lm_experiments_tools.modules.variants import VariantConfig

POSITIONS = ("absolute", "relative_key", "relative_key_query", "relative_attention_bias", "rotary", "alibi", "none")


@strict
class BertConfig(VariantConfig, transformers.BertConfig):
    """transformers' BertConfig and these keys:

    Args:
        pre_layer_norm: norm the inputs of attention and feed-forward (Xiong et al. 2020, arXiv 2002.04745), not the
            sums behind them.
        last_layer_norm: with pre_layer_norm, norm the output of the last layer, which nothing else does.
        position_embedding_type: "absolute" (Devlin et al. 2018), "relative_key" (Shaw et al. 2018, arXiv 1803.02155),
            "relative_key_query" (Huang et al. 2020, method 4, arXiv 2009.13658), "relative_attention_bias" (one T5
            table for all layers), "rotary", "alibi", "none", or a class of yours, "module:Class", a
            `lm_experiments_tools.attention.positions.PositionScheme` made as Class(config, bidirectional). All but
            "absolute" do without position embeddings.
        relative_attention_num_buckets, relative_last_bucket_distance: of "relative_attention_bias"; T5's 32 and 128.
        rotary_dim: features of a head that "rotary" turns, the first ones; all if None.
        rotary_base: of "rotary".
        sparse_config_cls, sparse_attention: name and settings of a block-sparse layout, e.g. "BigBird" and
            `{"block": 64}` (`lm_experiments_tools.attention.layouts`); DeepSpeed's names are understood.

    Raises:
        ValueError: settings that are unknown, out of range, or exclude each other.
    """

    variant_type = "lm_experiments_bert"
    variant_keys = ("pre_layer_norm", "position_embedding_type", "sparse_config_cls")

    pre_layer_norm: bool = False
    last_layer_norm: bool = True
    position_embedding_type: str = "absolute"
    relative_attention_num_buckets: int = 32
    relative_last_bucket_distance: int = 128
    rotary_dim: int | None = None
    rotary_base: float | int = 10000.0
    sparse_config_cls: str | None = None
    sparse_attention: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._check_sizes()
        if not isinstance(self.position_embedding_type, str):
            raise ValueError(f"position_embedding_type={self.position_embedding_type!r} must be a name.")
        if self.position_embedding_type not in POSITIONS and ":" not in self.position_embedding_type:
            raise ValueError(
                f"position_embedding_type={self.position_embedding_type!r} is none of {', '.join(POSITIONS)}, nor a "
                "class written module:Class."
            )
        if self.is_decoder or self.add_cross_attention:
            raise ValueError("is_decoder and add_cross_attention are for decoders, but this BERT is an encoder.")
        if not (self.last_layer_norm or self.pre_layer_norm):
            raise ValueError(
                "last_layer_norm=False goes with pre_layer_norm=True; otherwise each layer has its norms."
            )
        if self.rotary_dim is not None and self.position_embedding_type in set(POSITIONS) - {"rotary"}:
            raise ValueError(f'rotary_dim={self.rotary_dim} is of position_embedding_type "rotary": leave it out.')

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        for name in (*sizes, "max_position_embeddings", "type_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1.")
        if isinstance(self.hidden_act, str) and self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} names no activation of transformers.")
