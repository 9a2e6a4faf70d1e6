"""Conversion between this package's BERT and transformers' ModernBERT (Warner et al. 2024, arXiv 2412.13663) and
EuroBERT (Boizard et al. 2025, arXiv 2503.05500)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import EuroBertConfig, ModernBertConfig, PreTrainedConfig, PreTrainedModel

from lm_experiments_tools.errors import UserError
from modeling_bert.configuration_bert import BertConfig
from modeling_bert.modeling_bert import BertForMaskedLM, has_named_bias

_QKV, _GATE, _UP = ".attention.self.qkv.", ".intermediate.gate.", ".intermediate.up."  # joined or parted below
_PARTS = tuple(f".attention.self.{name}." for name in ("query", "key", "value"))
_WIDE, _BIAS = ".intermediate.dense.", "cls.predictions.bias"
_WORDS, _OUTPUT = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
    "tie_word_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip
# What both have in common, and what neither of them has.
_COMMON = {
    "type_vocab_size": 0, "pre_layer_norm": True, "last_layer_norm": True, "position_embedding_type": "rotary",
    "rotary_dim": None, "gated_mlp": True, "hidden_dropout_prob": 0.0, "is_decoder": False, "sparse_config_cls": None,
}  # fmt: skip


class _Family(NamedTuple):
    """A published model.

    Args:
        names: parts of its parameters' names and ours, replaced in this order.
        settings: values for `BertConfig`, from those of its config.json.
        config: its configuration from ours.
        model: name of transformers' class.
    """

    names: tuple[tuple[str, str], ...]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[BertConfig], PreTrainedConfig]
    model: str


def from_original(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> BertForMaskedLM:
    """Convert a ModernBERT or EuroBERT to this package's `BertForMaskedLM`.

    Args:
        settings: values of its config.json, or `model.config.to_dict()`.
        weights: its state dict, with the MLM head.

    Raises:
        UserError: another kind of model, a setting without an equivalent, or weights that do not fit the settings.
    """
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"model_type {kind!r} is none of {', '.join(FAMILIES)}, which convert to modeling_bert.")
    config = BertConfig(**FAMILIES[kind].settings(settings))
    ours = _to_our_names(kind, weights, config)
    with torch.device("meta"):
        model = BertForMaskedLM(config)
    try:
        model.load_state_dict(ours, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"The weights do not fit config.json of this {kind}: {' '.join(str(error).split())}"
        ) from error
    model.tie_weights()
    return model.eval()


def to_original(model: BertForMaskedLM, kind: str) -> PreTrainedModel:
    """Convert this package's `BertForMaskedLM` to a ModernBERT or EuroBERT of transformers.

    Args:
        kind: "modernbert" or "eurobert".

    Raises:
        UserError: the kind cannot express the model's configuration.
    """
    family, ours = FAMILIES[kind], model.config
    theirs = family.config(ours)
    expected = family.settings(theirs.to_dict())
    differ = sorted(key for key, value in expected.items() if getattr(ours, key) not in (None, value))
    if differ:
        raise UserError(f"{kind} cannot express {', '.join(f'{key}={getattr(ours, key)!r}' for key in differ)}.")
    weights = _to_their_names(kind, {name: weight.detach() for name, weight in model.state_dict().items()})
    converted = getattr(transformers, family.model)(theirs).to(model.dtype)
    converted.load_state_dict(weights)
    return converted.eval()


def _to_our_names(kind: str, weights: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    renamed, ours = {_replaced(name, FAMILIES[kind].names): weight for name, weight in weights.items()}, {}
    for name, weight in renamed.items():
        if _QKV in name:
            ours |= {name.replace(_QKV, part): value for part, value in zip(_PARTS, weight.chunk(3), strict=True)}
        elif _GATE in name:
            ours[name.replace(_GATE, _WIDE)] = torch.cat([weight, renamed[name.replace(_GATE, _UP)]])
        elif _UP not in name:
            ours[name] = weight
    if config.tie_word_embeddings and _WORDS in ours:  # files hold a shared matrix once
        ours[_OUTPUT] = ours[_WORDS]
    if has_named_bias(config) and f"{_OUTPUT[:-6]}bias" in ours:
        ours[_BIAS] = ours[f"{_OUTPUT[:-6]}bias"]
    return {name: weight.clone() for name, weight in ours.items()}


def _to_their_names(kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = tuple((ours, theirs) for theirs, ours in FAMILIES[kind].names)
    theirs = {}
    for name, weight in weights.items():
        if kind == "modernbert" and _PARTS[0] in name:
            weight = torch.cat([weights[name.replace(_PARTS[0], part)] for part in _PARTS])
            theirs[name.replace(_PARTS[0], _QKV)] = weight
        elif kind == "eurobert" and _WIDE in name:
            gate, up = weight.chunk(2)
            theirs |= {name.replace(_WIDE, _GATE): gate, name.replace(_WIDE, _UP): up}
        elif name != _BIAS and (kind != "modernbert" or not any(part in name for part in _PARTS)):
            theirs[name] = weight
    return {_replaced(name, names): weight for name, weight in theirs.items()}


def _replaced(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for before, after in names:
        name = name.replace(before, after)
    return name


def _modernbert_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    theirs = ModernBertConfig(**values)
    rope = {kind: _rotary_base(theirs.rope_parameters[kind]) for kind in set(theirs.layer_types)}
    local = "sliding_attention" in theirs.layer_types
    if "full_attention" not in rope:
        raise UserError("A ModernBERT without a full_attention layer has no equivalent in modeling_bert.")
    if any((theirs.embedding_dropout, theirs.mlp_dropout, theirs.attention_dropout)):
        raise UserError("ModernBERT's dropouts have other places than modeling_bert's: set them to 0 in config.json.")
    if theirs.classifier_activation != theirs.hidden_activation:
        raise UserError("classifier_activation and hidden_activation differ, but modeling_bert has one hidden_act.")
    return _COMMON | {key: getattr(theirs, key) for key in _SHARED} | {
        "layer_norm_eps": theirs.norm_eps, "norm_type": "layer_norm", "norm_bias": theirs.norm_bias,
        "hidden_act": theirs.hidden_activation, "attention_probs_dropout_prob": 0.0, "embedding_norm": True,
        "first_attention_norm": False, "num_key_value_heads": None, "rotary_base": rope["full_attention"],
        "layer_types": list(theirs.layer_types) if local else None,
        "local_attention": theirs.local_attention if local else None,
        "local_rotary_base": rope["sliding_attention"] if local else None,
        "head_transform": True, "classifier_bias": theirs.classifier_bias, "decoder_bias": theirs.decoder_bias,
    }  # fmt: skip


def _modernbert_config(ours: BertConfig) -> ModernBertConfig:
    local = ours.rotary_base if ours.local_rotary_base is None else ours.local_rotary_base
    bases = {"full_attention": ours.rotary_base, "sliding_attention": local}
    return ModernBertConfig(
        **{key: getattr(ours, key) for key in _SHARED},
        norm_eps=ours.layer_norm_eps, norm_bias=ours.norm_bias, classifier_bias=ours.classifier_bias,
        hidden_activation=ours.hidden_act, classifier_activation=ours.hidden_act, decoder_bias=ours.decoder_bias,
        layer_types=ours.layer_types or ["full_attention"] * ours.num_hidden_layers,
        local_attention=ours.local_attention or 128, cls_token_id=ours.bos_token_id, sep_token_id=ours.eos_token_id,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": float(base)} for kind, base in bases.items()},
    )  # fmt: skip


def _eurobert_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    theirs = EuroBertConfig(**values)
    if theirs.head_dim * theirs.num_attention_heads != theirs.hidden_size:
        raise UserError(
            f"head_dim={theirs.head_dim}: modeling_bert's heads are hidden_size / num_attention_heads wide."
        )
    return _COMMON | {key: getattr(theirs, key) for key in _SHARED} | {
        "num_key_value_heads": theirs.num_key_value_heads, "rotary_base": _rotary_base(theirs.rope_parameters),
        "hidden_act": theirs.hidden_act, "attention_probs_dropout_prob": theirs.attention_dropout,
        "decoder_bias": theirs.mlp_bias, "layer_norm_eps": theirs.rms_norm_eps, "norm_type": "rms_norm",
        "embedding_norm": False, "first_attention_norm": True, "layer_types": None, "head_transform": False,
    }  # fmt: skip


def _eurobert_config(ours: BertConfig) -> EuroBertConfig:
    return EuroBertConfig(
        **{key: getattr(ours, key) for key in _SHARED},
        num_key_value_heads=ours.num_key_value_heads, rms_norm_eps=ours.layer_norm_eps, hidden_act=ours.hidden_act,
        attention_dropout=ours.attention_probs_dropout_prob,
        rope_parameters={"rope_type": "default", "rope_theta": float(ours.rotary_base)},
    )  # fmt: skip


def _rotary_base(parameters: Mapping[str, Any]) -> float:
    if parameters["rope_type"] != "default":
        raise UserError(f"rope_type {parameters['rope_type']!r} has no equivalent in modeling_bert.")
    return parameters["rope_theta"]


_HEAD = "cls.predictions."
FAMILIES = {
    "modernbert": _Family(
        (
            ("model.embeddings.tok_embeddings.", "bert.embeddings.word_embeddings."),
            ("model.embeddings.norm.", "bert.embeddings.LayerNorm."), ("model.layers.", "bert.encoder.layer."),
            ("model.final_norm.", "bert.encoder.last_layer_ln."), (".attn_norm.", ".pre_attention_ln."),
            (".mlp_norm.", ".post_attention_ln."), (".attn.Wqkv.", _QKV), (".attn.Wo.", ".attention.output.dense."),
            (".mlp.Wi.", _WIDE), (".mlp.Wo.", ".output.dense."), ("head.dense.", f"{_HEAD}transform.dense."),
            ("head.norm.", f"{_HEAD}transform.LayerNorm."), ("decoder.", f"{_HEAD}decoder."),
        ),
        _modernbert_settings, _modernbert_config, "ModernBertForMaskedLM",
    ),
    "eurobert": _Family(
        (
            ("model.embed_tokens.", "bert.embeddings.word_embeddings."),
            ("model.norm.", "bert.encoder.last_layer_ln."),
            ("model.layers.", "bert.encoder.layer."), (".input_layernorm.", ".pre_attention_ln."),
            (".post_attention_layernorm.", ".post_attention_ln."), (".self_attn.q_proj.", _PARTS[0]),
            (".self_attn.k_proj.", _PARTS[1]), (".self_attn.v_proj.", _PARTS[2]),
            (".self_attn.o_proj.", ".attention.output.dense."), (".mlp.gate_proj.", _GATE), (".mlp.up_proj.", _UP),
            (".mlp.down_proj.", ".output.dense."), ("lm_head.", f"{_HEAD}decoder."),
        ),
        _eurobert_settings, _eurobert_config, "EuroBertForMaskedLM",
    ),
}  # fmt: skip
