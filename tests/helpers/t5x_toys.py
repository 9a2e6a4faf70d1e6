"""Checkpoints as t5x writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def write_t5x(model: torch.nn.Module, folder: Path, dtype: str = "float32") -> None:
    """The arrays by TensorStore, in chunks, as t5x has it write them."""
    tensorstore = pytest.importorskip("tensorstore")
    names = {
        "shared.weight": "token_embedder.embedding",
        "encoder.final_layer_norm.weight": "encoder.encoder_norm.scale",
        "decoder.final_layer_norm.weight": "decoder.decoder_norm.scale",
        "lm_head.weight": "decoder.logits_dense.kernel",
    }
    layers = {
        "encoder": ["pre_attention_layer_norm", "pre_mlp_layer_norm"],
        "decoder": ["pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"],
    }
    for stack, norms in layers.items():
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[bias] = f"{stack}.relpos_bias.rel_embedding"
        attentions = ["attention"] if stack == "encoder" else ["self_attention", "encoder_decoder_attention"]
        for i in range(2):
            ours, theirs = f"{stack}.block.{i}.layer", f"{stack}.layers_{i}"
            names |= {f"{ours}.{n}.layer_norm.weight": f"{theirs}.{norm}.scale" for n, norm in enumerate(norms)}
            for n, attention in enumerate(attentions):
                kind = "EncDecAttention" if n else "SelfAttention"
                for matrix in ("query", "key", "value", "out"):
                    names[f"{ours}.{n}.{kind}.{matrix[0]}.weight"] = f"{theirs}.{attention}.{matrix}.kernel"
            for matrix in ("wi", "wi_0", "wi_1", "wo"):
                names[f"{ours}.{len(norms) - 1}.DenseReluDense.{matrix}.weight"] = f"{theirs}.mlp.{matrix}.kernel"
    weights = dict(model.named_parameters())
    for ours, theirs in names.items():
        if ours in weights:
            turned = theirs.endswith(("kernel", "rel_embedding"))
            array = (weights[ours].T if turned else weights[ours]).detach().numpy()
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": str(folder / f"target.{theirs}")},
                "metadata": {"compressor": {"id": "gzip"}, "chunks": [max(1, size * 2 // 3) for size in array.shape]},
            }
            store = tensorstore.open(spec, create=True, dtype=getattr(tensorstore, dtype), shape=array.shape).result()
            store.write(array.astype(store.dtype.numpy_dtype)).result()
