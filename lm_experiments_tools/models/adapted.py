"""Convert a pre-trained decoder to an encoder or to an encoder-decoder.

    decoder            encoder                                           encoder-decoder
    Gemma 2            modeling_bert:Gemma2ForMaskedLM                   transformers' T5Gemma (arXiv 2504.06225)
    Gemma 3 (text)     modeling_bert:Gemma3ForMaskedLM                   transformers' T5Gemma 2 (arXiv 2512.14856)
    Qwen 3             modeling_bert:Qwen3ForMaskedLM
    Llama, Qwen 2      transformers' EuroBertForMaskedLM

In T5Gemma, encoder and decoder are both copies of the source. Cross-attention is initialized from the decoder's
self-attention, or randomly if the encoder has another width (arXiv 2504.06225, section 3). T5Gemma 2 has no
cross-attention weights: its self-attention attends to the encoder's output too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm_experiments_tools.checkpoint.conversion import quiet_loading
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import set_decoder_start
from lm_experiments_tools.modules.user_classes import get_cls_by_name
from modeling_t5.t5gemma import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ENCODERS = {
    "gemma2": "modeling_bert:Gemma2ForMaskedLM",
    "gemma3_text": "modeling_bert:Gemma3ForMaskedLM",
    "llama": "transformers:EuroBertForMaskedLM",
    "qwen2": "transformers:EuroBertForMaskedLM",
    "qwen3": "modeling_bert:Qwen3ForMaskedLM",
}
ENCODER_DECODERS = {
    "gemma2": "transformers:T5GemmaForConditionalGeneration",
    "gemma3_text": "transformers:T5Gemma2ForConditionalGeneration",
}
_NOT_CARRIED = {"architectures", "model_type", "use_bidirectional_attention", "transformers_version", "dtype"}
_NORMS = {"input_layernorm": "pre_self_attn_layernorm", "post_attention_layernorm": "post_self_attn_layernorm"}
_CROSS = {"self_attn.": "cross_attn.", "self_attn_layernorm": "cross_attn_layernorm"}
_NEW = ("cross_attn", "vision_tower", "multi_modal_projector")  # modules that no decoder has


def adapted_encoder(source: PreTrainedModel, mask_token_id: int, pad_token_id: int | None) -> PreTrainedModel:
    """Convert a decoder to a masked language model: the same weights, without the causal mask.

    Args:
        source: a `...ForCausalLM` of transformers (see `ENCODERS`).
        mask_token_id, pad_token_id: the tokenizer's ids of the mask token and of the padding token (None if it has
            none).

    Raises:
        UserError: there is no encoder class for this kind of decoder or for its settings.
    """
    kind = _check(source, ENCODERS, "encoder")
    cls, weights = get_cls_by_name(ENCODERS[kind]), source.state_dict()
    tokens = {"pad_token_id": pad_token_id, "mask_token_id": mask_token_id}
    config = _config(cls.config_class, source.config, **tokens)
    if kind == "qwen2":  # has no bias of the output projection, EuroBERT all four
        config.attention_bias = True
        for i in range(config.num_hidden_layers):
            weights[f"model.layers.{i}.self_attn.o_proj.bias"] = torch.zeros(config.hidden_size)
    if kind == "qwen2" and "sliding_attention" in source.config.layer_types:
        raise UserError("a Qwen2 with use_sliding_window has no encoder class in transformers: choose another source.")
    if getattr(config, "mlp_bias", False):
        raise UserError("a Llama with mlp_bias has no encoder class in transformers: choose another source.")
    return _built(cls, config, weights, seed=0)


def adapted_encoder_decoder(
    source: PreTrainedModel, encoder: PreTrainedModel | None = None, *, seed: int
) -> PreTrainedModel:
    """Convert a decoder to an encoder-decoder (T5Gemma or T5Gemma 2).

    The decoder starts from the source, and so does the encoder unless another model is given for it.

    Args:
        source: a Gemma 2 or Gemma 3 with a language model head.
        encoder: another Gemma 2 of any size; None for the source.
        seed: seed of random weights: cross-attention if the encoder has another width; the vision part of T5Gemma 2.

    Raises:
        UserError: T5Gemma cannot express the source, or the encoder does not fit it.
    """
    kind = _check(source, ENCODER_DECODERS, "encoder-decoder")
    cls, tied = get_cls_by_name(ENCODER_DECODERS[kind]), bool(source.config.tie_word_embeddings)
    if source.config.bos_token_id is None or source.config.pad_token_id is None:
        raise UserError("config.json of the source has no bos_token_id or no pad_token_id: the decoder needs both.")
    if encoder is not None:
        _check_pair(source, encoder)
    body, other = _layers(source), _layers(source if encoder is None else encoder)
    weights = {f"model.decoder.{name}": value for name, value in body.items()}
    weights["lm_head.out_proj.weight"] = source.lm_head.weight
    config_cls, module = cls.config_class, None if encoder is None else encoder.config
    if kind == "gemma2":
        weights |= {f"model.encoder.{name}": value.clone() for name, value in other.items()}
        if module is None or module.hidden_size == source.config.hidden_size:
            weights |= _cross_attention(body)
        part = config_cls.sub_configs["decoder"]
        parts = {"encoder": _config(part, module or source.config), "decoder": _config(part, source.config)}
        config = config_cls(**parts, tie_word_embeddings=tied, vocab_size=source.config.vocab_size)
    else:
        weights |= {f"model.encoder.text_model.{name}": value.clone() for name, value in other.items()}
        decoder = _config(config_cls.sub_configs["decoder"], source.config)
        text = _config(config_cls.sub_configs["encoder"].sub_configs["text_config"], source.config)
        config = text_config(text, decoder, tie_word_embeddings=tied)
        for name in ("encoder.text_model", "decoder"):
            weights[f"model.{name}.embed_tokens.eoi_embedding"] = torch.zeros(source.config.hidden_size)
    model = _built(cls, config, weights, seed)
    set_decoder_start(model)
    return model


def _check(source: PreTrainedModel, table: dict[str, str], what: str) -> str:
    """The source's `model_type`, or UserError if it cannot become `what`."""
    config, name = source.config, type(source).__name__
    kind = config.model_type
    if kind not in table or not name.endswith("ForCausalLM"):
        if kind in ENCODERS and table is not ENCODERS:
            raise UserError(
                f"a {name} ({kind}) cannot become an encoder-decoder: T5Gemma's classes need a Gemma 2 or Gemma 3. "
                "Make an encoder of it, or choose another source."
            )
        raise UserError(f"a {name} ({kind}) cannot become an {what}: sources are {', '.join(table)}.")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise UserError(f"this {name} is bidirectional already: it needs no adapting.")
    return kind


def _check_pair(source: PreTrainedModel, encoder: PreTrainedModel) -> None:
    kinds = {source.config.model_type, encoder.config.model_type}
    if kinds != {"gemma2"}:
        raise UserError(f"--encoder needs two Gemma 2 models, not {' and '.join(sorted(kinds))}.")
    _check(encoder, ENCODER_DECODERS, "encoder-decoder")
    if encoder.config.vocab_size != source.config.vocab_size:
        raise UserError(
            f"--encoder has {encoder.config.vocab_size} tokens, the source {source.config.vocab_size}: they need one "
            "vocabulary."
        )


def _layers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights without the head, by their names in T5Gemma's encoder and decoder."""
    found = {}
    for name, value in model.model.state_dict().items():
        words = [_NORMS.get(word, word) for word in name.split(".")]
        found[".".join(words)] = value
    return found


def _cross_attention(decoder: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights of self-attention and its norms."""
    found = {}
    for name, value in decoder.items():
        for ours, cross in _CROSS.items():
            if ours in name:
                found[f"model.decoder.{name.replace(ours, cross)}"] = value.clone()
    return found


def _config(cls: type, source: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """A configuration of `cls` with the source's values of the keys that both have."""
    keys = {field.name for field in dataclasses.fields(cls)} - _NOT_CARRIED
    values = {key: value for key, value in source.to_dict().items() if key in keys}
    values |= {key: value for key, value in changes.items() if key in keys}
    return cls(**values)


def _built(cls: type, config: PreTrainedConfig, weights: dict[str, Tensor], seed: int) -> PreTrainedModel:
    """The model with these weights, in their dtype.

    Others are random, from `seed`, and rounded to bfloat16, so that they fit in any dtype the weights are saved in.
    """
    dtype = next(iter(weights.values())).dtype
    with quiet_loading(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = cls.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    new = info["missing_keys"]
    assert all(any(word in name for word in _NEW) for name in new), new
    assert not info["unexpected_keys"] and not info["mismatched_keys"], info
    for name in new:
        weight = model.get_parameter(name)
        weight.data = weight.data.bfloat16().to(dtype)
    for part in model.modules():  # else a part loads in this dtype, whatever the one of the saved weights
        if hasattr(part, "config"):
            part.config.dtype = None
    return model.eval()
