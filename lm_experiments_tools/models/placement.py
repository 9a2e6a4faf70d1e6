"""Where and in which precision weights are stored: in 8 or 4 bits, on several devices, or in main memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.modules.devices import HostEmbedding

if TYPE_CHECKING:
    from lm_experiments_tools.config.finetuning import FinetuningArgs

logger = logging.getLogger(__name__)

NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
# Heads are trained next to a quantized body, so they stay unquantized.
_HEADS = ["classifier", "score", "classification_head", "pre_classifier", "pooler", "lm_head"]


def loading_options(args: FinetuningArgs) -> dict[str, Any]:
    """Arguments of `from_pretrained` that follow from --quantize, --inference_dtype and --device_map.

    Raises:
        UserError: bitsandbytes is missing, or the device map's file cannot be read.
    """
    options: dict[str, Any] = {} if args.inference_dtype is None else {"dtype": weights_dtype(args)}
    if args.quantize is not None:
        options["quantization_config"] = _quantization(args)
    if args.device_map is not None:
        is_named = args.device_map in NAMED_MAPS
        if not is_named and not Path(args.device_map).is_file():
            raise UserError(f"--device_map {args.device_map} is neither {', '.join(NAMED_MAPS)} nor a JSON file.")
        options["device_map"] = args.device_map if is_named else read_json(Path(args.device_map))
    return options


def weights_dtype(args: FinetuningArgs) -> torch.dtype:
    """Return the dtype of unquantized weights: `--inference_dtype` (for evaluation), else float32."""
    return {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.inference_dtype]


def _quantization(args: FinetuningArgs) -> Any:
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--quantize {args.quantize} needs the package bitsandbytes ({error}): pip install bitsandbytes"
        ) from error
    if args.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=_HEADS)
    compute = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else weights_dtype(args)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.quantize,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=_HEADS,
    )


def say_where(model: nn.Module) -> None:
    """Log which devices hold the layers of a model loaded with --device_map."""
    layers: dict[str, list[str]] = {}
    for module, device in (getattr(model, "hf_device_map", None) or {"": model.device}).items():
        layers.setdefault(str(device), []).append(module or "all layers")
    for device, names in layers.items():
        logger.info("on %s: %s", device, ", ".join(names))


def host_embeddings(model: nn.Module) -> None:
    """Keep the token embeddings of a model in main memory, by turning them into `HostEmbedding`s. Raises UserError."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is not None and output.weight is table.weight:
        raise UserError(
            f"--embeddings_on_cpu: the output layer of {type(model).__name__} is tied to its embeddings: choose a "
            "model with untied ones (T5 v1.1)."
        )
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is table.weight:
            if type(module) is not nn.Embedding:
                raise UserError(f"--embeddings_on_cpu: {type(module).__name__} is more than a look-up.")
            module.__class__ = HostEmbedding
