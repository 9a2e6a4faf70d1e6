"""Tiny random decoders of the architectures that `lmtools adapt` reads, in fp64."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 640
_CLASSES = {"gemma2": "Gemma2", "gemma3_text": "Gemma3", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def toy_decoder(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Two layers, of Gemma one with a window of 4; norms and biases are random too.

    The width is a square number: the root of another one is exact in no dtype, and Gemma's embedding keeps it in fp32.
    """
    cls = getattr(transformers, f"{_CLASSES[kind]}ForCausalLM")
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if kind != "qwen2":
        settings["head_dim"] = 4
    if kind.startswith("gemma"):
        layers = ["sliding_attention", "full_attention"]
        settings |= {"sliding_window": 4, "query_pre_attn_scalar": 4, "layer_types": layers}
    torch.manual_seed(seed)
    model = cls(cls.config_class(**(settings | changes))).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def toy_ids(length: int, seed: int = 0) -> torch.Tensor:
    """Ids [2, length] without special tokens."""
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
