"""transformers' T5Gemma (arXiv 2504.06225) as this package's T5, and back: the same numbers, gradients included.

Gemma keeps a norm's weight minus one; everything else is renamed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from modeling_t5.configuration_t5 import T5Config
from modeling_t5.modeling_t5 import T5ForConditionalGeneration

_SIZES = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "d_kv": "head_dim", "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads",
    "layer_norm_epsilon": "rms_norm_eps", "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping", "local_attention": "sliding_window",
}  # fmt: skip
_TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id")
_ACTIVATION = "gelu_pytorch_tanh"
# Parts of names, theirs -> ours; {} is the number of the feed-forward sublayer, 1 in an encoder, 2 in a decoder.
_NAMES = (
    (r"^model\.(encoder|decoder)\.layers\.", r"\1.block."),
    (r"^model\.(encoder|decoder)\.", r"\1."),
    (r"\.norm\.weight$", ".final_layer_norm.weight"),
    (r"\.self_attn\.(.)_proj", r".layer.0.SelfAttention.\1"),
    (r"\.cross_attn\.(.)_proj", r".layer.1.EncDecAttention.\1"),
    (r"\.pre_self_attn_layernorm", ".layer.0.layer_norm"),
    (r"\.post_self_attn_layernorm", ".layer.0.post_layer_norm"),
    (r"\.pre_cross_attn_layernorm", ".layer.1.layer_norm"),
    (r"\.post_cross_attn_layernorm", ".layer.1.post_layer_norm"),
    (r"\.pre_feedforward_layernorm", ".layer.{}.layer_norm"),
    (r"\.post_feedforward_layernorm", ".layer.{}.post_layer_norm"),
    (r"\.mlp\.gate_proj", ".layer.{}.DenseReluDense.wi_0"),
    (r"\.mlp\.up_proj", ".layer.{}.DenseReluDense.wi_1"),
    (r"\.mlp\.down_proj", ".layer.{}.DenseReluDense.wo"),
    (r"^lm_head\.out_proj", "lm_head"),
)


def name_of(theirs: str) -> str:
    """modeling_t5's name for a parameter of T5GemmaForConditionalGeneration."""
    name = theirs
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name.replace("{}", "1" if name.startswith("encoder") else "2")


def config_of(theirs: T5GemmaConfig) -> T5Config:
    """The configuration here.

    Raises:
        ValueError: encoder and decoder differ in more than their number of layers, or another unsupported setting.
    """
    encoder, decoder = theirs.encoder, theirs.decoder
    sizes = {ours: getattr(decoder, name) for ours, name in _SIZES.items()}
    base = decoder.rope_parameters["rope_theta"]
    every = _global_layers(decoder.layer_types)
    for fits, what in (
        (all(getattr(encoder, name) == getattr(decoder, name) for name in _SIZES.values()), "encoders of other sizes"),
        (encoder.rope_parameters == decoder.rope_parameters, "encoders with other positions"),
        (decoder.rope_parameters["rope_type"] == "default", f"rope_type {decoder.rope_parameters['rope_type']}"),
        (every == _global_layers(encoder.layer_types) and every is not None, "irregular layer_types"),
        (decoder.hidden_activation == encoder.hidden_activation == _ACTIVATION, "another activation"),
        (not decoder.attention_bias and not encoder.attention_bias, "attention_bias"),
        (encoder.query_pre_attn_scalar == decoder.query_pre_attn_scalar, "encoders with other scales"),
    ):
        if not fits:
            raise ValueError(f"T5Config has no {what}: load this T5Gemma as transformers' own class.")
    if every == 1:
        sizes["local_attention"] = None
    general = {name: getattr(decoder, name) for name in _TOKENS} | {
        "decoder_start_token_id": decoder.bos_token_id, "tie_word_embeddings": bool(theirs.tie_word_embeddings),
        "scale_decoder_outputs": False,
    }  # fmt: skip
    return T5Config(
        **sizes, num_layers=encoder.num_hidden_layers, num_decoder_layers=decoder.num_hidden_layers,
        position_embedding_type="rotary", rotary_base=base, feed_forward_proj=f"gated-{_ACTIVATION}",
        attention_scale=decoder.query_pre_attn_scalar**-0.5, global_attn_every_n_layers=every, post_norms=True,
        scale_embeddings=True, separate_encoder_embeddings=True, dropout_rate=theirs.dropout_rate,
        **general,
    )  # fmt: skip


def t5gemma_config_of(ours: T5Config) -> T5GemmaConfig:
    """The inverse of `config_of`."""
    part: dict[str, Any] = {name: getattr(ours, mine) for mine, name in _SIZES.items()}
    part |= {name: getattr(ours, name) for name in _TOKENS}
    part |= {
        "query_pre_attn_scalar": round(ours.attention_scale**-2),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(ours.rotary_base)},
    }
    every = 1 if ours.local_attention is None else ours.global_attn_every_n_layers

    def stack(layers: int) -> dict[str, Any]:
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        return {**part, "num_hidden_layers": layers, "layer_types": kinds}

    return T5GemmaConfig(
        encoder=stack(ours.num_layers), decoder=stack(ours.num_decoder_layers), vocab_size=ours.vocab_size,
        dropout_rate=ours.dropout_rate, tie_word_embeddings=ours.tie_word_embeddings,
    )  # fmt: skip


def from_t5gemma(theirs: T5GemmaForConditionalGeneration) -> T5ForConditionalGeneration:
    """A T5 of this package with the weights of a T5Gemma, in its dtype. Raises ValueError as `config_of`."""
    model = T5ForConditionalGeneration(config_of(theirs.config)).to(theirs.dtype)
    _copy(theirs, model, 1.0)
    return model.train(theirs.training)


def to_t5gemma(ours: T5ForConditionalGeneration) -> T5GemmaForConditionalGeneration:
    """The T5Gemma of which `from_t5gemma` makes this model."""
    model = T5GemmaForConditionalGeneration(t5gemma_config_of(ours.config)).to(ours.dtype)
    _copy(model, ours, -1.0)
    return model.train(ours.training)


@torch.no_grad()
def _copy(theirs: torch.nn.Module, ours: torch.nn.Module, one: float) -> None:
    """Copy theirs to ours with `one` 1, ours to theirs with -1; it is added to the weights of norms."""
    own: dict[str, Tensor] = ours.state_dict()
    for name, value in theirs.state_dict().items():
        target, source = (own[name_of(name)], value)[:: 1 if one > 0 else -1]
        target.copy_(source + one if "norm" in name else source)


def _global_layers(kinds: list[str]) -> int | None:
    """n if each n-th layer is global and the others local; None for another pattern."""
    n = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    expected = ["sliding_attention" if (i + 1) % n else "full_attention" for i in range(len(kinds))]
    return n if kinds == expected else None
