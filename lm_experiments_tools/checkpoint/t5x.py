"""Checkpoints of t5x: folders of zarr arrays such as `target.encoder.layers_0.mlp.wi.kernel`. Needs no t5x or jax.

Names and transpositions follow the converter that transformers 5 has dropped: t5x stores matrices as [in, out] and
relative positions as [heads, buckets].
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from pathlib import Path

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
_MATRICES = {"query": "q", "key": "k", "value": "v", "out": "o", **{n: n for n in ("wi", "wi_0", "wi_1", "wo")}}
_OUTSIDE_LAYERS = {
    "token_embedder.embedding": "shared.weight",
    "encoder.encoder_norm.scale": "encoder.final_layer_norm.weight",
    "decoder.decoder_norm.scale": "decoder.final_layer_norm.weight",
    "encoder.relpos_bias.rel_embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder.relpos_bias.rel_embedding": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
}


def is_t5x(path: Path) -> bool:
    return path.is_dir() and any(path.glob(f"{_PREFIX}*/.zarray"))


def read_t5x(path: Path) -> dict[str, Tensor]:
    """Read the weights of a t5x checkpoint, named as in transformers' T5ForConditionalGeneration. Raises UserError."""
    folders = sorted(folder for folder in path.glob(f"{_PREFIX}*") if (folder / ".zarray").is_file())
    weights = {}
    for folder in folders:
        name = folder.name.removeprefix(_PREFIX)
        is_transposed = name.endswith((".kernel", ".rel_embedding"))
        tensor = _read_zarr(folder)
        weights[_name_of(name, folder)] = tensor.T.contiguous() if is_transposed else tensor
    return weights


def _name_of(name: str, folder: Path) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
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
    """An array of zarr's version 2: a grid of chunks, each in its own file."""
    info = read_json(folder / ".zarray")
    compressor = info.get("compressor")
    if info.get("order") != "C" or (compressor or {}).get("id", "gzip") != "gzip":
        raise UserError(f"{folder}: it is compressed by {compressor} in order {info.get('order')}, not by gzip in C.")
    is_bfloat16 = info["dtype"] == "bfloat16"
    shape, chunks = info["shape"], info["chunks"]
    array = np.zeros(shape, np.dtype("<u2" if is_bfloat16 else info["dtype"]))
    for index in itertools.product(*(range(math.ceil(s / c)) for s, c in zip(shape, chunks, strict=True))):
        file = folder / info.get("dimension_separator", ".").join(map(str, index))
        try:
            content = gzip.decompress(file.read_bytes()) if compressor else file.read_bytes()
            values = np.frombuffer(content, array.dtype).reshape(chunks)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise UserError(f"{file} is damaged ({error}): copy the checkpoint again.") from error
        corner = tuple(slice(i * c, min((i + 1) * c, s)) for i, c, s in zip(index, chunks, shape, strict=True))
        array[corner] = values[tuple(slice(0, s.stop - s.start) for s in corner)]
    tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
    return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).float()
