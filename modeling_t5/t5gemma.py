"""Convert transformers' T5Gemma (arXiv 2504.06225) to our T5 and back.

Outputs and gradients are equal. Parameters are renamed, and 1 is added to the weights of norms, as Gemma stores them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from lm_experiments_tools.errors import UserError
from modeling_t5.configuration_t5 import T5Config
from modeling_t5.modeling_t5 import T5ForConditionalGeneration

_SIZES = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "d_kv": "head_dim", "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads",
    "layer_norm_epsilon": "rms_norm_eps", "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping", "local_attention": "sliding_window",
}  # fmt: skip
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id")
# Other settings of T5Config that the logits depend on.
_SETTINGS = (
    *T5Config.variant_keys, "rotary_dim", "rotary_base", "num_cdq_heads", "feed_forward_proj", "tie_word_embeddings",
    "scale_decoder_outputs",
)  # fmt: skip
_ACTIVATION = "gelu_pytorch_tanh"
# Parts of names, theirs -> ours; {} is the number of the feed-forward sublayer, 1 in an encoder, 2 in a decoder.
_NAMES = (
    (r"^model\.", ""),
    (r"^(encoder|decoder)\.layers\.", r"\1.block."),
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
    """Convert a parameter's name in T5Gemma to the name in this package's T5."""
    name = theirs
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name.replace("{}", "1" if name.startswith("encoder") else "2")


def config_of(theirs: T5GemmaConfig) -> T5Config:
    """Convert the configuration of a T5Gemma to a `T5Config`.

    Raises:
        UserError: encoder and decoder differ in more than their number of layers, or a setting is not supported.
    """
    encoder, decoder = theirs.encoder, theirs.decoder
    every = _global_every(max(decoder.layer_types, encoder.layer_types, key=len))
    kind = decoder.rope_parameters["rope_type"]
    for fits, what in (
        (all(getattr(encoder, name) == getattr(decoder, name) for name in _SIZES.values()), "encoders of other sizes"),
        (encoder.rope_parameters == decoder.rope_parameters, "encoders with other positions"),
        (kind == "default", f"rope_type {kind}"),
        (
            all(part.layer_types == _layer_types(len(part.layer_types), every) for part in (encoder, decoder)),
            "irregular layer_types",
        ),
        (decoder.hidden_activation == encoder.hidden_activation == _ACTIVATION, "another activation"),
        (not decoder.attention_bias and not encoder.attention_bias, "attention_bias"),
        (encoder.query_pre_attn_scalar == decoder.query_pre_attn_scalar, "encoders with other scales"),
    ):
        if not fits:
            raise UserError(f"T5Config has no {what}: load this T5Gemma as transformers' own class.")
    sizes = {ours: getattr(decoder, name) for ours, name in _SIZES.items()}
    general = {name: getattr(decoder, name) for name in _TOKENS} | {
        "decoder_start_token_id": decoder.bos_token_id, "tie_word_embeddings": bool(theirs.tie_word_embeddings),
        "scale_decoder_outputs": False,
    }  # fmt: skip
    if every == 1:
        sizes["local_attention"] = None
    return T5Config(
        **sizes, **general, num_layers=encoder.num_hidden_layers, num_decoder_layers=decoder.num_hidden_layers,
        position_embedding_type="rotary", rotary_base=decoder.rope_parameters["rope_theta"],
        feed_forward_proj=f"gated-{_ACTIVATION}", attention_scale=decoder.query_pre_attn_scalar**-0.5,
        global_attn_every_n_layers=every, post_norms=True, scale_embeddings=True, separate_encoder_embeddings=True,
        dropout_rate=theirs.dropout_rate,
    )  # fmt: skip


def t5gemma_config_of(ours: T5Config) -> T5GemmaConfig:
    """Convert a `T5Config` to the configuration of a T5Gemma; UserError if the logits would change."""
    if ours.d_model % ours.num_heads:  # checked by the classes of transformers, with another error
        raise UserError(f"T5Gemma requires d_model={ours.d_model} to be a multiple of num_heads={ours.num_heads}.")
    part: dict[str, Any] = {name: getattr(ours, mine) for mine, name in _SIZES.items()}
    part |= {name: float(part[name]) for name in _CAPS if part[name] is not None}
    part |= {name: getattr(ours, name, None) for name in _TOKENS}
    if getattr(ours, "decoder_start_token_id", None) is not None:  # T5Gemma starts from its decoder's BOS
        part["bos_token_id"] = ours.decoder_start_token_id
    part["num_key_value_heads"] = ours.num_key_value_heads or ours.num_heads
    part["sliding_window"] = ours.local_attention or 1  # transformers requires one even if no layer is local
    part["query_pre_attn_scalar"] = max(1, round(ours.attention_scale**-2))
    part["rope_parameters"] = {"rope_type": "default", "rope_theta": float(ours.rotary_base)}
    every = 1 if ours.local_attention is None else ours.global_attn_every_n_layers
    encoder, decoder = (
        {**part, "num_hidden_layers": n, "layer_types": _layer_types(n, every)}
        for n in (ours.num_layers, ours.num_decoder_layers)
    )
    theirs = T5GemmaConfig(
        encoder=encoder,
        decoder=decoder,
        vocab_size=ours.vocab_size,
        dropout_rate=ours.dropout_rate,
        tie_word_embeddings=ours.tie_word_embeddings,
    )
    expected, found = _computed(config_of(theirs)), _computed(ours)
    if differs := [f"{name}={getattr(ours, name)!r}" for name in found if found[name] != expected[name]]:
        raise UserError(f"This T5 cannot be written as T5Gemma: {', '.join(differs)}.")
    return theirs


def from_t5gemma(theirs: T5GemmaForConditionalGeneration) -> T5ForConditionalGeneration:
    """Convert a T5Gemma to this package's T5, in the same dtype; UserError as in `config_of`."""
    model = T5ForConditionalGeneration(config_of(theirs.config)).to(theirs.dtype)
    _copy(theirs, model, 1.0)
    return model.train(theirs.training)


def to_t5gemma(ours: T5ForConditionalGeneration) -> T5GemmaForConditionalGeneration:
    """Convert this package's T5 to a T5Gemma, in the same dtype; UserError as in `t5gemma_config_of`."""
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


def _computed(config: T5Config) -> dict[str, Any]:
    """Settings that affect the logits, normalized so that equal models have equal ones."""
    settings = {name: getattr(config, name) for name in _SETTINGS}
    settings["num_key_value_heads"] = config.num_key_value_heads or config.num_heads
    if config.local_attention is None or config.global_attn_every_n_layers == 1:
        settings["local_attention"] = None
    return settings


def _layer_types(num_layers: int, every: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]


def _global_every(kinds: list[str]) -> int:
    """n if each n-th layer is global."""
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
