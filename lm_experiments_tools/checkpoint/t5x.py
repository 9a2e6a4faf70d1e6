"""Checkpoints of t5x, read without it: a folder of zarr arrays, target.encoder.layers_0.mlp.wi.kernel and so on.

transformers 5 has dropped its converter, which needed t5x, jax and a machine for both. The names and transpositions
are those of that converter: t5x keeps matrices as [in, out] and relative positions as [heads, buckets].
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json

_PREFIX = "target."
_LAYER = re.compile(r"(encoder|decoder)\.layers_(\d+)\.(.+)")
_PARTS = {
    "encoder": {
        "pre_attention_layer_norm.scale": "layer.0.layer_norm.weight",
        "pre_mlp_layer_norm.scale": "layer.1.layer_norm.weight",
        "attention": "layer.0.SelfAttention",
        "mlp": "layer.1.DenseReluDense",
    },
    "decoder": {
        "pre_self_attention_layer_norm.scale": "layer.0.layer_norm.weight",
        "pre_cross_attention_layer_norm.scale": "layer.1.layer_norm.weight",
        "pre_mlp_layer_norm.scale": "layer.2.layer_norm.weight",
        "self_attention": "layer.0.SelfAttention",
        "encoder_decoder_attention": "layer.1.EncDecAttention",
        "mlp": "layer.2.DenseReluDense",
    },
}
_MATRICES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "out": "o",
    "wi": "wi",
    "wi_0": "wi_0",
    "wi_1": "wi_1",
    "wo": "wo",
}
_ELSEWHERE = {
    "token_embedder.embedding": "shared.weight",
    "encoder.encoder_norm.scale": "encoder.final_layer_norm.weight",
    "decoder.decoder_norm.scale": "decoder.final_layer_norm.weight",
    "encoder.relpos_bias.rel_embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder.relpos_bias.rel_embedding": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
}


def is_t5x(path: Path) -> bool:
    """True for a folder that holds arrays as t5x writes them."""
    return path.is_dir() and any(path.glob(f"{_PREFIX}*/.zarray"))


def read_t5x(path: Path) -> dict[str, Tensor]:
    """The weights by the names of transformers' T5ForConditionalGeneration.

    Raises:
        UserError: an array that is none of a T5, damaged, or written by another compressor than gzip.
    """
    folders = sorted(folder for folder in path.glob(f"{_PREFIX}*") if (folder / ".zarray").is_file())
    weights = {}
    for folder in folders:
        name = folder.name.removeprefix(_PREFIX)
        turned = name.endswith((".kernel", ".rel_embedding"))
        tensor = _read_zarr(folder)
        weights[_name_of(name, folder)] = tensor.T.contiguous() if turned else tensor
    return weights


def _name_of(name: str, folder: Path) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if match := _LAYER.fullmatch(name):
        stack, number, rest = match.groups()
        parts = _PARTS[stack]
        if rest in parts:
            return f"{stack}.block.{number}.{parts[rest]}"
        module, _, matrix = rest.removesuffix(".kernel").partition(".")
        if rest.endswith(".kernel") and module in parts and matrix in _MATRICES:
            return f"{stack}.block.{number}.{parts[module]}.{_MATRICES[matrix]}.weight"
    raise UserError(f"{folder}: a T5 has no such weight: t5x's variants are not converted, only T5 and T5 v1.1.")


def _read_zarr(folder: Path) -> Tensor:
    """An array of zarr's version 2: a grid of chunks, each a file of its own."""
    about = read_json(folder / ".zarray")
    compressor = about.get("compressor")
    if about.get("order") != "C" or (compressor or {}).get("id", "gzip") != "gzip":
        raise UserError(f"{folder}: it is compressed by {compressor} in order {about.get('order')}, not by gzip in C.")
    is_bfloat16 = about["dtype"] == "bfloat16"
    shape, chunks = about["shape"], about["chunks"]
    whole = np.zeros(shape, np.dtype("<u2" if is_bfloat16 else about["dtype"]))
    counts = [math.ceil(size / chunk) for size, chunk in zip(shape, chunks, strict=True)]
    for place in itertools.product(*map(range, counts)):
        name = about.get("dimension_separator", ".").join(map(str, place))
        values = _read_chunk(folder / name, compressor, whole.dtype, chunks)
        corner = tuple(slice(p * c, min((p + 1) * c, s)) for p, c, s in zip(place, chunks, shape, strict=True))
        whole[corner] = values[tuple(slice(0, s.stop - s.start) for s in corner)]
    tensor = torch.from_numpy(whole.view(np.int16) if is_bfloat16 else whole)
    return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).float()


def _read_chunk(file: Path, compressor: Any, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if compressor else content
        return np.frombuffer(content, dtype).reshape(shape)
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing: copy the checkpoint again.") from error
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise UserError(f"{file} is damaged ({error}): copy the checkpoint again.") from error
