"""Export models to ONNX, compare them with torch, and run them in ONNX Runtime.

Files, inputs and outputs have optimum's names, so its ORTModel classes can load them. An encoder-decoder consists of
three graphs: encoder, first decoding step, and later decoding steps with cached keys and values.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.modules.inspection import forward_names

Function = Callable[..., "tuple[Tensor, ...]"]

CLASSIFIER, ENCODER, DECODER = "model.onnx", "encoder_model.onnx", "decoder_model.onnx"
LATER_STEP = "decoder_with_past_model.onnx"
TOLERANCE = 1e-4  # relative to the largest value: fp32 sums in another order
_INPUTS = ("input_ids", "attention_mask")
_SEGMENTS = "token_type_ids"
_FIRST_INPUTS = ("input_ids", "encoder_hidden_states", "encoder_attention_mask")
_LATER_INPUTS = ("input_ids", "encoder_attention_mask")
_CACHED = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")  # of each layer


class _Called(nn.Module):
    """A function of a model and tensors as a module, which torch.onnx requires."""

    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.model, *tensors)


def _classify(model: nn.Module, *inputs: Tensor) -> tuple[Tensor]:
    return (model(**dict(zip((*_INPUTS, _SEGMENTS), inputs, strict=False))).logits,)


def _encode(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
    return (model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state,)


def _decode(model: nn.Module, ids: Tensor, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Logits, then keys and values of each layer: `_CACHED`."""
    outputs = model(encoder_outputs=(hidden,), attention_mask=mask, decoder_input_ids=ids, use_cache=True)
    return (outputs.logits, *_tensors(outputs.past_key_values))


def _tensors(cache: EncoderDecoderCache) -> list[Tensor]:
    """Keys and values, `_CACHED` of each layer."""
    layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    return [tensor for both in layers for layer in both for tensor in (layer.keys, layer.values)]


def _decode_later(model: nn.Module, ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    """Logits of one more token, [rows, 1, vocabulary], then keys and values of self-attention with that token."""
    cache = _filled(past)
    hidden = past[2].new_zeros(*mask.shape, model.config.hidden_size)  # only its shape is used
    outputs = model(
        encoder_outputs=(hidden,), attention_mask=mask, decoder_input_ids=ids, past_key_values=cache, use_cache=True
    )
    return (outputs.logits, *(t for layer in cache.self_attention_cache.layers for t in (layer.keys, layer.values)))


def _filled(past: Sequence[Tensor]) -> EncoderDecoderCache:
    """The cache of an encoder-decoder with these keys and values, `_CACHED` of each layer."""
    caches = DynamicCache(), DynamicCache()
    for number in range(0, len(past), len(_CACHED)):
        for cache, at in zip(caches, (number, number + 2), strict=True):
            cache.update(past[at], past[at + 1], number // len(_CACHED))
    return EncoderDecoderCache(*caches)


def _cached_names(prefix: str, layers: int, kinds: Sequence[str] = _CACHED) -> tuple[str, ...]:
    return tuple(f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in kinds)


def export(model: PreTrainedModel, folder: Path | str) -> dict[str, float]:
    """Write a model as ONNX with its configuration into `folder`, and compare its outputs with torch.

    A classifier becomes model.onnx: input_ids, attention_mask and, if the model uses them, token_type_ids,
    int64[rows, length] -> logits. An encoder-decoder becomes

        encoder_model.onnx              input_ids, attention_mask -> last_hidden_state
        decoder_model.onnx              input_ids, encoder_hidden_states, encoder_attention_mask
                                        -> logits, present.0.decoder.key, present.0.decoder.value,
                                        present.0.encoder.key, present.0.encoder.value, present.1.decoder.key, ...
        decoder_with_past_model.onnx    input_ids [rows, 1], encoder_attention_mask, past_key_values.0.decoder.key, ...
                                        -> logits, present.0.decoder.key, present.0.decoder.value, ...

    The number of rows and the lengths are dynamic.

    Returns:
        file name -> largest absolute difference from torch.

    Raises:
        UserError: a package is missing, the model is a decoder or an encoder that is no classifier, has a part that
            ONNX cannot hold, or the graph's numbers are not the model's.
    """
    check_onnxruntime()
    _check_attention(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = model.eval().cpu().float()
    model.set_attn_implementation("eager")  # the exporter cannot follow the strides of torch's fused attention
    traced, compared = _example(model, 2, 7), _example(model, 3, 12)
    if model.config.is_encoder_decoder:
        graphs = _graphs_of_encoder_decoder(model, traced, compared)
    elif model.can_generate():
        raise UserError(f"{type(model).__name__} is a decoder, which is not exported as ONNX.")
    elif not any("SequenceClassification" in base.__name__ for base in type(model).__mro__):
        raise UserError(f"{type(model).__name__} is no classifier: fine-tune it first.")
    else:
        names = _INPUTS
        if _SEGMENTS in forward_names(model) and getattr(model.config, "type_vocab_size", 2) > 1:
            names = (*_INPUTS, _SEGMENTS)
            traced, compared = ((*rows, rows[0] % 2) for rows in (traced, compared))
        graphs = {CLASSIFIER: _Graph(_classify, names, ("logits",), traced, compared)}
    differences = {name: _export_one(model, folder / name, graph) for name, graph in graphs.items()}
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return differences


def _check_attention(model: PreTrainedModel) -> None:
    """Raise UserError for block-sparse attention, whose layout is made for one length."""
    if getattr(model.config, "sparse_config_cls", None) is not None:
        raise UserError(
            f"{type(model).__name__} has block-sparse attention (sparse_config_cls), whose layout is made for one "
            "length, while an ONNX graph serves all."
        )


def check_onnxruntime() -> None:
    """Check that the packages for ONNX export are installed. Raises UserError."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs packages ({error}): pip install onnx onnxscript onnxruntime") from error


def _example(model: nn.Module, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, length - 2 :] = 0
    return ids, mask


class _Graph(NamedTuple):
    """A function of a model, the names of its inputs and outputs, and inputs to trace it with and to compare it on."""

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    traced: tuple[Tensor, ...]
    compared: tuple[Tensor, ...]


@torch.no_grad()
def _graphs_of_encoder_decoder(model: nn.Module, *inputs: tuple[Tensor, Tensor]) -> dict[str, _Graph]:
    first, later = [], []
    for (ids, mask), length in zip(inputs, (4, 6), strict=True):
        first.append((ids[:, :length].contiguous(), *_encode(model, ids, mask), mask))
        past = _decode(model, *first[-1])[1:]
        later.append((ids[:, -1:].contiguous(), mask, *past))
    layers = len(past) // len(_CACHED)
    present, later_names = _cached_names("present", layers), _cached_names("past_key_values", layers)
    self_attention = _cached_names("present", layers, _CACHED[:2])
    return {
        ENCODER: _Graph(_encode, _INPUTS, ("last_hidden_state",), *inputs),
        DECODER: _Graph(_decode, _FIRST_INPUTS, ("logits", *present), *first),
        LATER_STEP: _Graph(_decode_later, (*_LATER_INPUTS, *later_names), ("logits", *self_attention), *later),
    }


def _free(tensor: Tensor) -> dict[int, Any]:
    """Axes of free size: rows and tokens of [rows, tokens, ...] or [rows, heads, tokens, features]; of a single
    token, rows alone."""
    tokens = 2 if tensor.dim() == 4 else 1
    return dict.fromkeys((0, tokens) if tensor.shape[tokens] > 1 else (0,), torch.export.Dim.DYNAMIC)


def _export_one(model: nn.Module, file: Path, graph: _Graph) -> float:
    module = _Called(model, graph.function).eval()
    try:
        with torch.no_grad(), _quiet_export():
            torch.onnx.export(
                module,
                graph.traced,
                str(file),
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=(tuple(map(_free, graph.traced)),),  # of *tensors
                dynamo=True,
                verbose=False,
            )
    except (RuntimeError, torch.onnx.OnnxExporterError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be written as ONNX: {first_line(error.__cause__ or error)}"
        ) from error
    with torch.no_grad():
        expected = module(*graph.compared)
    found = _Session(file)(*(tensor.numpy() for tensor in graph.compared))
    differences = []
    for ours, theirs in zip(map(torch.from_numpy, found), expected, strict=True):
        differences.append(float((ours - theirs).abs().max()))
        if not differences[-1] <= TOLERANCE * max(1.0, float(theirs.abs().max())):
            raise UserError(f"{file} does not compute what the model does: they differ by {differences[-1]:.3g}.")
    return max(differences)


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Silence the exporter's progress on stdout, its logs, and its warnings about torch."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.disable(disabled)


class _Session:
    """A graph as a function of its inputs in order, which returns its outputs in order."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.names = [entry.name for entry in self.session.get_inputs()]

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        return self.session.run(None, dict(zip(self.names, arrays, strict=True)))


class _Encoder(nn.Module):
    main_input_name = "input_ids"

    def __init__(self, session: _Session) -> None:
        super().__init__()
        self.session = session

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        (hidden,) = self.session(input_ids.numpy(), attention_mask.numpy())
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))


class OnnxModel(PreTrainedModel, GenerationMixin):
    """Run an exported model in ONNX Runtime on the CPU: `logits` for a classifier, `generate` for an encoder-decoder.

    Args:
        folder: folder that `export` has written.
    """

    main_input_name = "input_ids"

    def __init__(self, folder: Path | str) -> None:
        check_onnxruntime()
        names = (CLASSIFIER, ENCODER, DECODER, LATER_STEP)
        files = {name: Path(folder, name) for name in names if Path(folder, name).is_file()}
        if CLASSIFIER not in files and not files.keys() >= {ENCODER, DECODER, LATER_STEP}:
            raise UserError(f"{folder} holds no ONNX files of lmtools export --output.")
        super().__init__(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        self.sessions = {name: _Session(file) for name, file in files.items()}
        self.placed = nn.Parameter(torch.zeros(()), requires_grad=False)  # gives device and dtype
        if ENCODER in files:
            self.encoder = _Encoder(self.sessions[ENCODER])
            self.generation_config = GenerationConfig.from_pretrained(folder)
        self.eval()

    def logits(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return a classifier's logits, float[rows, classes]. Inputs are int64[rows, length]."""
        session = self.sessions[CLASSIFIER]
        inputs = [input_ids, attention_mask]
        if _SEGMENTS in session.names:
            inputs.append(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        return torch.from_numpy(session(*(tensor.numpy() for tensor in inputs))[0])

    def generate(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int = 128, **options: Any) -> Tensor:
        """Generate with an encoder-decoder; returns token ids, int64[rows, length].

        Args:
            options: arguments of transformers' `generate` that override generation_config.json.
        """
        if ENCODER not in self.sessions:
            raise UserError("a classifier generates no text: call logits.")
        options = {"attention_mask": attention_mask, "max_new_tokens": max_new_tokens, **options}
        return super().generate(input_ids, **options)

    def get_encoder(self, *_: Any) -> nn.Module:
        """Return the encoder, for transformers' `generate`."""
        return self.encoder

    def forward(
        self,
        decoder_input_ids: Tensor,
        encoder_outputs: BaseModelOutput,
        attention_mask: Tensor,
        past_key_values: EncoderDecoderCache | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        """Run a decoding step for transformers' `generate`.

        The decoder reads the last token, or all tokens if the cache is empty.
        """
        cache, is_later = past_key_values, past_key_values is not None and past_key_values.get_seq_length() > 0
        inputs = (decoder_input_ids, encoder_outputs[0], attention_mask)
        if is_later:
            inputs = (decoder_input_ids, attention_mask, *_tensors(cache))
        session = self.sessions[LATER_STEP if is_later else DECODER]
        logits, *made = map(torch.from_numpy, session(*(tensor.numpy() for tensor in inputs)))
        if is_later:
            for layer, keys, values in zip(cache.self_attention_cache.layers, made[::2], made[1::2], strict=True):
                layer.keys, layer.values = keys, values
        elif cache is not None:
            cache = _filled(made)
        return Seq2SeqLMOutput(logits=logits, past_key_values=cache)
