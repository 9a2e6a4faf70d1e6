"""Models as ONNX files, checked against torch, and run by ONNX Runtime.

`optimum` has no place here: optimum-onnx 0.1.0 (the last) requires transformers below 4.58. torch.onnx exports by
itself, with optimum's names of files, inputs and outputs, so that its ORTModel classes read them: an encoder with its
classifier becomes one graph, an encoder-decoder three, the encoder, the decoder's first step, which makes the keys and
values of all layers, and a later step, which takes those of the steps before. A decoder without a cache is written
without the third. torch_ort, which trained a model inside ONNX Runtime, has had no release for torch 2.3 or later:
`lmtools export` is for inference.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.modules.inspection import forward_names

if TYPE_CHECKING:
    import numpy as np
    from transformers import EncoderDecoderCache, GenerationConfig, PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)
Function = Callable[..., "tuple[Tensor, ...]"]

CLASSIFIER, ENCODER, DECODER = "model.onnx", "encoder_model.onnx", "decoder_model.onnx"
LATER_STEP = "decoder_with_past_model.onnx"
_NAMES_BEFORE = {ENCODER: "encoder.onnx", DECODER: "decoder.onnx"}  # of folders without a cache
TOLERANCE = 1e-4  # of the largest value: fp32 sums in another order
_INPUTS = ("input_ids", "attention_mask")
_SEGMENTS = "token_type_ids"
_FIRST_INPUTS = ("input_ids", "encoder_hidden_states", "encoder_attention_mask")
_LATER_INPUTS = ("input_ids", "encoder_attention_mask")
_CACHED = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")  # of each layer


class _Called(nn.Module):
    """A function of tensors as the module that torch.onnx wants."""

    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.model, *tensors)


def _classify(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, *segments: Tensor) -> tuple[Tensor]:
    outputs = model(
        input_ids=input_ids, attention_mask=attention_mask, **dict(zip([_SEGMENTS], segments, strict=False))
    )
    return (outputs.logits,)


def _encode(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
    return (model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state,)


def _decode(model: nn.Module, ids: Tensor, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Logits, then keys and values of each layer, if the model caches any: `_CACHED`."""
    outputs = model(encoder_outputs=(hidden,), attention_mask=mask, decoder_input_ids=ids, use_cache=True)
    cache = outputs.get("past_key_values")
    if cache is None:
        return (outputs.logits,)
    layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    return (outputs.logits, *(t for both in layers for layer in both for t in (layer.keys, layer.values)))


def _decode_later(model: nn.Module, ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    """Logits of one token more, [rows, 1, words], then keys and values of self-attention, that token's too."""
    cache = _filled(past)
    hidden = past[2].new_zeros(*mask.shape, model.config.hidden_size)  # is not looked at any more
    outputs = model(
        encoder_outputs=(hidden,), attention_mask=mask, decoder_input_ids=ids, past_key_values=cache, use_cache=True
    )
    return (outputs.logits, *(t for layer in cache.self_attention_cache.layers for t in (layer.keys, layer.values)))


def _filled(past: Sequence[Tensor]) -> EncoderDecoderCache:
    """The cache of an encoder-decoder with these keys and values, `_CACHED` of each layer."""
    from transformers import DynamicCache, EncoderDecoderCache

    caches = DynamicCache(), DynamicCache()
    for number in range(0, len(past), len(_CACHED)):
        for cache, at in zip(caches, (number, number + 2), strict=True):
            cache.update(past[at], past[at + 1], number // len(_CACHED))
    return EncoderDecoderCache(*caches)


def _cached_names(prefix: str, layers: int, kinds: Sequence[str] = _CACHED) -> tuple[str, ...]:
    return tuple(f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in kinds)


def export(model: PreTrainedModel, folder: Path | str) -> dict[str, float]:
    """Write a model's graphs into `folder`, with its configuration, and compare them with torch.

    An encoder with a classification head gives model.onnx (input_ids, attention_mask and, where the model tells two
    sentences apart by them, token_type_ids, int64[rows, length] -> logits); an encoder-decoder gives

        encoder_model.onnx              input_ids, attention_mask -> last_hidden_state
        decoder_model.onnx              input_ids, encoder_hidden_states, encoder_attention_mask
                                        -> logits, present.0.decoder.key, present.0.decoder.value,
                                        present.0.encoder.key, present.0.encoder.value, present.1.decoder.key, ...
        decoder_with_past_model.onnx    input_ids [rows, 1], encoder_attention_mask, past_key_values.0.decoder.key, ...
                                        -> logits, present.0.decoder.key, present.0.decoder.value, ...

    Rows and lengths are free.

    Returns:
        file name -> largest absolute difference from torch, on inputs of other sizes than the traced ones.

    Raises:
        UserError: a package is missing, the model is a decoder or has a part that ONNX cannot hold, or the graph's
            numbers are not the model's.
    """
    check_onnxruntime()
    _check_attention(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = model.eval().cpu().float()
    model.set_attn_implementation("eager")  # the exporter cannot follow the strides of torch's fused attention
    rows, other_rows = _example(model, 2, 7), _example(model, 3, 12)
    if model.config.is_encoder_decoder:
        graphs = _graphs_of_encoder_decoder(model, rows, other_rows)
    elif model.can_generate():
        raise UserError(
            f"{type(model).__name__} is a decoder, which is not exported: name an encoder with a classification head, "
            "or an encoder-decoder."
        )
    else:
        names, asked = _INPUTS, (rows, other_rows)
        if _takes_segments(model):
            names, asked = (*_INPUTS, _SEGMENTS), tuple((*some, _two_sentences(some[0])) for some in asked)
        graphs = {CLASSIFIER: _Graph(_classify, names, ("logits",), *asked)}
    differences = {name: _export_one(model, folder / name, graph) for name, graph in graphs.items()}
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return differences


def _check_attention(model: PreTrainedModel) -> None:
    """Raises UserError for lists of blocks, which are made for one length, while a graph serves all."""
    config, name = model.config, type(model).__name__
    layout = getattr(config, "sparse_config_cls", None)
    if layout is not None:
        raise UserError(
            f"{name} has block-sparse attention ({layout}), whose lists of blocks are made for one length, while a "
            "graph serves all: it cannot be written as ONNX."
        )
    if getattr(config, "attention_type", None) == "block_sparse":
        raise UserError(
            f"{name} has block-sparse attention for long inputs alone, and a graph computes all lengths alike: with "
            "attention_type original_full in its config.json it is written with full attention."
        )


def check_onnxruntime() -> None:
    """Raises UserError where a package of ONNX is missing."""
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


def _takes_segments(model: nn.Module) -> bool:
    return _SEGMENTS in forward_names(model) and getattr(model.config, "type_vocab_size", 2) > 1


def _two_sentences(ids: Tensor) -> Tensor:
    """token_type_ids int64[rows, length]: the second half of each row is of the second sentence."""
    segments = torch.zeros_like(ids)
    segments[:, ids.shape[1] // 2 :] = 1
    return segments


class _Graph(NamedTuple):
    """A function of a model, the names of its inputs and outputs, and inputs to trace it with and to compare it on."""

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    traced: tuple[Tensor, ...]
    asked: tuple[Tensor, ...]


@torch.no_grad()
def _graphs_of_encoder_decoder(model: nn.Module, *inputs: tuple[Tensor, Tensor]) -> dict[str, _Graph]:
    first, later = [], []
    for (ids, mask), length in zip(inputs, (4, 6), strict=True):
        first.append((ids[:, :length].contiguous(), *_encode(model, ids, mask), mask))
        _, *past = _decode(model, *first[-1])
        later.append((ids[:, -1:].contiguous(), mask, *past))
    layers = len(past) // len(_CACHED)
    graphs = {
        ENCODER: _Graph(_encode, _INPUTS, ("last_hidden_state",), *inputs),
        DECODER: _Graph(_decode, _FIRST_INPUTS, ("logits", *_cached_names("present", layers)), *first),
    }
    if layers:
        names = *_LATER_INPUTS, *_cached_names("past_key_values", layers)
        graphs[LATER_STEP] = _Graph(
            _decode_later, names, ("logits", *_cached_names("present", layers, _CACHED[:2])), *later
        )
    else:
        logger.warning("%s has no cache: each token costs a pass over all before it", type(model).__name__)
    return graphs


def _free(tensor: Tensor) -> dict[int, Any]:
    """The axes whose size is free: rows and tokens, [rows, tokens, ...] or [rows, heads, tokens, features]; of one
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
            f"{type(model).__name__} cannot be written as ONNX: {_said(error)}; models with attention of their own "
            "kind are not supported."
        ) from error
    except ImportError as error:
        raise UserError(f"ONNX needs packages ({error}): pip install onnx onnxscript onnxruntime") from error
    with torch.no_grad():
        expected = module(*graph.asked)
    found = _Session(file)(*(tensor.numpy() for tensor in graph.asked))
    differences = []
    for ours, theirs in zip(map(torch.from_numpy, found), expected, strict=True):
        differences.append(float((ours - theirs).abs().max()))
        if not differences[-1] <= TOLERANCE * max(1.0, float(theirs.abs().max())):
            raise UserError(f"{file} does not compute what the model does: they differ by {differences[-1]:.3g}.")
    return max(differences)


def _said(error: Exception) -> str:
    """What the cause of an exporter's exception, or else itself, says first, without the colours of a terminal."""
    return first_line(RuntimeError(re.sub(r"\x1b\[[0-9;]*m", "", str(error.__cause__ or error))))


@contextmanager
def _quiet_export() -> Any:
    """The exporter reports its progress on stdout, each of its optimisations on the log, and warns itself of torch."""
    loud = logging.getLogger("onnxscript"), logging.getLogger("onnx_ir"), logging.getLogger("torch.onnx")
    levels = [log.level for log in loud]
    for log in loud:
        log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for log, level in zip(loud, levels, strict=True):
            log.setLevel(level)


class _Session:
    """A graph, called with its inputs in order; gives its outputs in order."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.names = [entry.name for entry in self.session.get_inputs()]

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        return self.session.run(None, dict(zip(self.names, arrays, strict=True)))


class OnnxModel:
    """The files of `export` in ONNX Runtime on the CPU, with the two verbs of the torch model.

    Args:
        folder: of `export`.
    """

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoConfig, GenerationConfig

        check_onnxruntime()
        folder = Path(folder)
        files = {name: folder / name for name in (CLASSIFIER, ENCODER, DECODER, LATER_STEP)}
        for name, before in _NAMES_BEFORE.items():
            files[name] = files[name] if files[name].is_file() else folder / before
        files = {name: file for name, file in files.items() if file.is_file()}
        if CLASSIFIER not in files and not files.keys() >= {ENCODER, DECODER}:
            raise UserError(
                f"{folder} has neither {CLASSIFIER} nor {ENCODER} and {DECODER}: write it by lmtools export."
            )
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self.sessions: Mapping[str, _Session] = {name: _Session(file) for name, file in files.items()}
        self.generator = None
        if ENCODER in files:
            self.generator = _generator(self.config, GenerationConfig.from_pretrained(folder), self.sessions)

    def logits(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """float[rows, classes] of a classifier; without `token_type_ids` a row is one sentence."""
        session = self.sessions[CLASSIFIER]
        asked = [input_ids, attention_mask]
        if _SEGMENTS in session.names:
            asked.append(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        return torch.from_numpy(session(*(tensor.numpy() for tensor in asked))[0])

    def generate(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int = 128, **options: Any) -> Tensor:
        """Text of an encoder-decoder, int64[rows, length], as torch's `generate` gives it.

        The loop is transformers', so that all of generation_config.json counts: beams, sampling, forced and
        suppressed tokens, penalties.

        Args:
            options: more of transformers' `generate`, over those of generation_config.json.
        """
        if self.generator is None:
            raise UserError("a classifier writes no text: ask for its logits.")
        return self.generator.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            use_cache=LATER_STEP in self.sessions,
            **options,
        )


def _generator(config: PreTrainedConfig, generation: GenerationConfig, sessions: Mapping[str, _Session]) -> Any:
    """transformers' generation around the graphs of an encoder-decoder."""
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

    class Encoder(nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
            (hidden,) = sessions[ENCODER](input_ids.numpy(), attention_mask.numpy())
            return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))

    class Generator(PreTrainedModel, GenerationMixin):
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__(config)
            self.encoder = Encoder()
            self.placed = nn.Parameter(torch.zeros(()), requires_grad=False)  # says device and type of numbers
            self.generation_config = generation

        def get_encoder(self, *_: Any) -> nn.Module:
            return self.encoder

        def forward(
            self,
            decoder_input_ids: Tensor,
            encoder_outputs: BaseModelOutput,
            attention_mask: Tensor,
            past_key_values: EncoderDecoderCache | None = None,
            **_: Any,
        ) -> Seq2SeqLMOutput:
            if past_key_values is not None and past_key_values.get_seq_length():
                return self.later_step(decoder_input_ids, attention_mask, past_key_values)
            asked = decoder_input_ids, encoder_outputs[0], attention_mask
            logits, *made = map(torch.from_numpy, sessions[DECODER](*(tensor.numpy() for tensor in asked)))
            cache = None if past_key_values is None else _filled(made)
            return Seq2SeqLMOutput(logits=logits, past_key_values=cache)

        def later_step(self, ids: Tensor, attention_mask: Tensor, cache: EncoderDecoderCache) -> Seq2SeqLMOutput:
            own, crossed = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
            past = [t for both in zip(own, crossed, strict=True) for layer in both for t in (layer.keys, layer.values)]
            asked = (tensor.numpy() for tensor in (ids, attention_mask, *past))
            logits, *made = map(torch.from_numpy, sessions[LATER_STEP](*asked))
            for layer, keys, values in zip(own, made[::2], made[1::2], strict=True):
                layer.keys, layer.values = keys, values
            return Seq2SeqLMOutput(logits=logits, past_key_values=cache)

    return Generator().eval()
