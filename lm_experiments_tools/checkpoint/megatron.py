"""Read checkpoints of Megatron-LM's BERT and T5 in its `torch` format, of one or more tensor-parallel ranks.

    weights, kind, settings = read_megatron("runs/bert/iter_0100000")

Megatron's BERT is transformers' MegatronBert. Its T5 has learned positions and pre-norm layers, unlike T5, and is
transformers' Blenderbot. Megatron stores queries, keys and values in one matrix [heads, 3, head width, D],
transformers in three [D, D], where D is the width of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_experiments_tools.checkpoint.legacy import read_pickle
from lm_experiments_tools.errors import UserError

_FILE, _TRACKER = "model_optim_rng.pt", "latest_checkpointed_iteration.txt"
_IGNORED_PACKAGES = ("megatron", "numpy", "types", "_codecs")
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
# Transformer Engine's layers have the norm before them inside.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_ROWS = ("word_embeddings", "linear_qkv", "linear_q", "linear_kv", "linear_fc1", "output_layer")  # split by rows
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_BERT = {
    "input_layernorm": "attention.ln",
    "self_attention.linear_qkv": "attention.self.query attention.self.key attention.self.value",
    "self_attention.linear_proj": "attention.output.dense",
    "pre_mlp_layernorm": "ln",
    "mlp.linear_fc1": "intermediate.dense",
    "mlp.linear_fc2": "output.dense",
    "embedding.word_embeddings": "bert.embeddings.word_embeddings",
    "embedding.position_embeddings": "bert.embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "encoder.final_layernorm": "bert.encoder.ln",
    "pooler.dense": "bert.pooler.dense",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "output_layer": "cls.predictions.decoder",
    "binary_head": "cls.seq_relationship",
}
_T5 = {
    "input_layernorm": "self_attn_layer_norm",
    "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.out_proj",
    "pre_cross_attn_layernorm": "encoder_attn_layer_norm",
    "cross_attention.linear_q": "encoder_attn.q_proj",
    "cross_attention.linear_kv": "encoder_attn.k_proj encoder_attn.v_proj",
    "cross_attention.linear_proj": "encoder_attn.out_proj",
    "pre_mlp_layernorm": "final_layer_norm",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
    "embedding.word_embeddings": "model.shared",
    "embedding.position_embeddings": "model.encoder.embed_positions",
    "encoder.final_layernorm": "model.encoder.layer_norm",
    "decoder.final_layernorm": "model.decoder.layer_norm",
    "output_layer": "lm_head",
}
_REQUIRED_ARGS = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "swiglu": False,
    "squared_relu": False,
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
    "qk_layernorm": False,
    "group_query_attention": False,
    "num_experts": None,
}
_SIZES = ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")


def is_megatron(path: Path) -> bool:
    """True for a Megatron-LM checkpoint: the folder of a run, an iteration or a rank, or a rank's file."""
    inside = path.is_dir() and (any(path.glob("mp_rank_*")) or (path / _TRACKER).is_file())
    return path.name == _FILE or inside or any((path / name).is_file() for name in (_FILE, "common.pt"))


def read_megatron(path: Path, allow_pickle: bool = False) -> tuple[dict[str, Tensor], str, dict[str, Any]]:
    """Read the weights of a Megatron-LM checkpoint.

    Returns:
        Weights by transformers' names, the name of their class in transformers, and settings for its configuration.

    Raises:
        UserError: a rank is missing, or the model, its format or parallelism is not supported, or the file holds
            objects other than tensors and settings.
    """
    folder = _iteration(path)
    ranks, args = _ranks(folder, allow_pickle)
    named = [_named(rank) for rank in ranks]
    is_t5 = "decoder.final_layernorm.weight" in named[0] and "encoder.final_layernorm.weight" in named[0]
    if not is_t5 and "lm_head.dense.weight" not in named[0]:
        raise UserError(f"{folder}: it is neither a BERT nor a T5 of Megatron-LM: only these are converted.")
    for name, value in _REQUIRED_ARGS.items():
        if args.get(name, value) != value:
            raise UserError(f"{folder}: {name} is {args[name]}; only models with {value} are converted.")
    needed = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.bias")
    if absent := [name for name in needed[: 2 if is_t5 else 3] if name not in named[0]]:
        raise UserError(f"{folder}: the model has no {absent[0]}.")
    if differ := [name for name in named[0] if any(name not in other for other in named)]:
        raise UserError(f"{folder}: {differ[0]} is not in every rank: copy the checkpoint again.")
    merged = {name: _merged(name, [rank[name].float() for rank in named], folder) for name in named[0]}
    rows, padded = len(merged["embedding.word_embeddings.weight"]), args.get("padded_vocab_size")
    if padded is not None and padded != rows:
        raise UserError(f"{folder}: the embedding has {rows} rows, its args say {padded} (padded_vocab_size).")
    weights: dict[str, Tensor] = {}
    for name, value in merged.items():
        weights |= _renamed(name, value, args["num_attention_heads"], is_t5, folder)
    return weights, *(_t5_settings if is_t5 else _bert_settings)(weights, args)


def _iteration(path: Path) -> Path:
    """The folder that holds those of the ranks."""
    if path.name == _FILE:
        return path.absolute().parent.parent
    if (path / _FILE).is_file():
        return path.absolute().parent
    tracker = path / _TRACKER
    step = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else ""
    if step not in ("", "release") and not step.isdecimal():
        raise UserError(f"{tracker} names no iteration, but {step[:40]!r}: put one of the folders iter_... into it.")
    folder = path / (f"iter_{int(step):07d}" if step.isdecimal() else step)
    if (folder / "common.pt").is_file():
        raise UserError(f"{folder} is in Megatron's torch_dist format: convert it with --ckpt-convert-format torch.")
    return folder


def _ranks(folder: Path, allow_pickle: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The model of each tensor-parallel rank, and Megatron's arguments."""
    found = sorted(path.name for path in folder.glob("mp_rank_*"))
    if pipeline := [name for name in found if not re.fullmatch(r"mp_rank_\d+", name)]:
        raise UserError(f"{folder / pipeline[0]} is a pipeline stage: convert it to one stage with Megatron-LM.")
    contents = [_read_rank(folder / "mp_rank_00" / _FILE, allow_pickle)]
    args = vars(contents[0]["args"])
    if missing := [name for name in _SIZES if not isinstance(args.get(name), int) or args[name] < 1]:
        raise UserError(f"{folder}: its args have no {', '.join(missing)}.")
    if (stages := args.get("pipeline_model_parallel_size", 1)) != 1:
        raise UserError(f"{folder} is split over {stages} stages of a pipeline: convert it to one with Megatron-LM.")
    size = args.get("tensor_model_parallel_size") or 1
    if len(found) > size:
        raise UserError(f"{folder} has {len(found)} ranks, its args say {size}: remove those of another run.")
    contents += [_read_rank(folder / f"mp_rank_{rank:02}" / _FILE, allow_pickle) for rank in range(1, size)]
    if len(steps := {content.get("iteration") for content in contents}) > 1:
        raise UserError(f"{folder}: its ranks are of the iterations {', '.join(sorted(map(str, steps)))}.")
    return [content["model"] for content in contents], args


def _read_rank(file: Path, allow_pickle: bool) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file} is missing: copy the checkpoint again, with every rank.")
    content = read_pickle(file, allow_pickle=allow_pickle, left_out=_IGNORED_PACKAGES)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not hasattr(content.get("args"), "__dict__") or "language_model" in model:
        raise UserError(f"{file} has no `model` and `args` of megatron.core: convert older ones with Megatron-LM.")
    return content


def _named(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a rank by the names of Megatron's own layers, each once."""
    named = {}
    for name, value in model.items():
        for fused, norm in _FUSED.items():
            name = name.replace(fused, norm)
        name = name.replace("lm_head.output_layer.", "output_layer.")
        if isinstance(value, Tensor) and name != "position_embeddings.weight" and not name.endswith("_extra_state"):
            named[name] = value
    return named


def _merged(name: str, shards: list[Tensor], folder: Path) -> Tensor:
    """A weight of all ranks: concatenated, or identical in each."""
    if name.split(".")[-2:][0] in _ROWS:
        return torch.cat(shards)
    if name.endswith(_COLUMNS):
        return torch.cat(shards, dim=1)
    if not all(torch.equal(shards[0], shard) for shard in shards):
        raise UserError(f"{folder}: {name} differs between the ranks: they are of different checkpoints.")
    return shards[0]


def _renamed(name: str, value: Tensor, heads: int, is_t5: bool, folder: Path) -> dict[str, Tensor]:
    """One weight by transformers' name or, of queries, keys and values, by two or three."""
    names = _T5 if is_t5 else _BERT
    layer = _LAYER.fullmatch(name)
    stack, number, part, kind = layer.groups() if layer else ("", "", *name.rpartition(".")[::2])
    if part not in names:
        raise UserError(f"{folder}: Megatron's {'T5' if is_t5 else 'BERT'} has no weight {name}.")
    prefix = (f"model.{stack}.layers.{number}." if is_t5 else f"bert.encoder.layer.{number}.") if layer else ""
    ours = names[part].split()
    values = [value]
    if len(ours) > 1:
        if value.shape[0] % (heads * len(ours)):
            raise UserError(f"{folder}: {name} has {value.shape[0]} rows, no multiple of {heads} heads.")
        values = [each.flatten(0, 1).contiguous() for each in value.unflatten(0, (heads, len(ours), -1)).unbind(1)]
    return {f"{prefix}{each}.{kind}": part for each, part in zip(ours, values, strict=True)}


def _bert_settings(weights: dict[str, Tensor], args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    weights["cls.predictions.bias"] = weights["cls.predictions.decoder.bias"]
    words = weights["bert.embeddings.word_embeddings.weight"]
    output = weights.setdefault("cls.predictions.decoder.weight", words)
    types = "bert.embeddings.token_type_embeddings.weight"
    weights.setdefault(types, torch.zeros(2, words.shape[1]))  # of a model without sentence pairs
    has_pairs = "bert.pooler.dense.weight" in weights
    return "MegatronBertForPreTraining" if has_pairs else "MegatronBertForMaskedLM", {
        "hidden_size": args["hidden_size"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": args["num_attention_heads"],
        "intermediate_size": args["ffn_hidden_size"],
        "max_position_embeddings": len(weights["bert.embeddings.position_embeddings.weight"]),
        "vocab_size": len(words),
        "type_vocab_size": len(weights[types]),
        "layer_norm_eps": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
        "hidden_act": _activation(args),
        "tie_word_embeddings": torch.equal(output, words),
    }


def _t5_settings(weights: dict[str, Tensor], args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    words, positions = weights["model.shared.weight"], weights["model.encoder.embed_positions.weight"]
    weights["model.decoder.embed_positions.weight"] = positions
    weights["model.encoder.embed_tokens.weight"] = weights["model.decoder.embed_tokens.weight"] = words
    output = weights.setdefault("lm_head.weight", words)
    weights["final_logits_bias"] = weights.pop("lm_head.bias", torch.zeros(len(words))).unsqueeze(0)
    return "BlenderbotForConditionalGeneration", {
        "d_model": args["hidden_size"],
        "encoder_layers": args.get("encoder_num_layers") or args["num_layers"],
        "decoder_layers": args.get("decoder_num_layers") or args["num_layers"],
        **{f"{stack}_attention_heads": args["num_attention_heads"] for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": args["ffn_hidden_size"] for stack in ("encoder", "decoder")},
        "max_position_embeddings": len(positions),
        "vocab_size": len(words),
        "activation_function": _activation(args),
        "scale_embedding": False,
        "tie_word_embeddings": torch.equal(output, words),
    }


def _activation(args: Mapping[str, Any]) -> str:
    """Megatron's fused gelu, and OpenAI's, are the one by tanh."""
    return "gelu_pytorch_tanh" if args.get("bias_gelu_fusion") or args.get("openai_gelu") else "gelu"
