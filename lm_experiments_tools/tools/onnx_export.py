"""Models as ONNX files, checked against torch, and run by ONNX Runtime.

`optimum` has no place here: optimum-onnx 0.1.0 (the last) requires transformers below 4.58. torch.onnx exports by
itself: an encoder with its classifier becomes one graph, an encoder-decoder two, the encoder and a step of the decoder
without a cache, so that text of n tokens costs n passes over what is written so far. torch_ort, which trained a model
inside ONNX Runtime, has had no release for torch 2.3 or later: `lmtools export` is for inference.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lm_experiments_tools.errors import UserError, first_line
from lm_experiments_tools.modules.inspection import forward_names

if TYPE_CHECKING:
    import numpy as np
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

CLASSIFIER, ENCODER, DECODER = "model.onnx", "encoder.onnx", "decoder.onnx"
TOLERANCE = 1e-4  # of the largest value: fp32 sums in another order
_INPUTS = ("input_ids", "attention_mask")
_SEGMENTS = "token_type_ids"
_STEP_INPUTS = ("decoder_input_ids", "encoder_hidden_states", "encoder_attention_mask")


class _Called(nn.Module):
    """A function of tensors as the module that torch.onnx wants."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(self.model, *tensors)


def _classify(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, *segments: Tensor) -> Tensor:
    return model(
        input_ids=input_ids, attention_mask=attention_mask, **dict(zip([_SEGMENTS], segments, strict=False))
    ).logits


def _encode(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _decode(model: nn.Module, decoder_input_ids: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
    outputs = model(
        encoder_outputs=(hidden,), attention_mask=mask, decoder_input_ids=decoder_input_ids, use_cache=False
    )
    return outputs.logits


def export(model: PreTrainedModel, folder: Path | str) -> dict[str, float]:
    """Write a model's graphs into `folder`, with its configuration, and compare them with torch.

    An encoder with a classification head gives model.onnx (input_ids, attention_mask and, where the model tells two
    sentences apart by them, token_type_ids, int64[rows, length] -> logits); an encoder-decoder gives encoder.onnx
    (input_ids, attention_mask -> hidden states) and decoder.onnx (decoder_input_ids, encoder_hidden_states,
    encoder_attention_mask -> logits). Rows and lengths are free.

    Returns:
        file name -> largest absolute difference from torch, on inputs of other sizes than the traced ones.

    Raises:
        UserError: a package is missing, the model is a decoder or has a part that ONNX cannot hold, or the graph's
            numbers are not the model's.
    """
    check_onnxruntime()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = model.eval().cpu().float()
    model.set_attn_implementation("eager")  # the exporter cannot follow the strides of torch's fused attention
    rows, other_rows = _example(model, 2, 7), _example(model, 3, 12)
    if model.config.is_encoder_decoder:
        with torch.no_grad():
            steps = [_step(model, inputs, length) for inputs, length in ((rows, 4), (other_rows, 6))]
        graphs = {
            ENCODER: (_encode, _INPUTS, rows, other_rows),
            DECODER: (_decode, _STEP_INPUTS, *steps),
        }
    elif model.can_generate():
        raise UserError(
            f"{type(model).__name__} is a decoder, which is not exported: name an encoder with a classification head, "
            "or an encoder-decoder."
        )
    else:
        names, asked = _INPUTS, (rows, other_rows)
        if _takes_segments(model):
            names, asked = (*_INPUTS, _SEGMENTS), tuple((*some, _two_sentences(some[0])) for some in asked)
        graphs = {CLASSIFIER: (_classify, names, *asked)}
    differences = {
        name: _export_one(model, folder / name, function, names, traced, asked)
        for name, (function, names, traced, asked) in graphs.items()
    }
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return differences


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


def _step(model: nn.Module, inputs: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs[0][:, :length].contiguous(), _encode(model, *inputs), inputs[1]


def _export_one(
    model: nn.Module,
    file: Path,
    function: Callable[..., Tensor],
    names: Sequence[str],
    traced: tuple[Tensor, ...],
    asked: tuple[Tensor, ...],
) -> float:
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    module = _Called(model, function).eval()
    try:
        with torch.no_grad(), _quiet_export():
            torch.onnx.export(
                module,
                traced,
                str(file),
                input_names=list(names),
                dynamic_shapes=(tuple(free for _ in traced),),  # of *tensors
                dynamo=True,
                verbose=False,
            )
    except (RuntimeError, torch.onnx.OnnxExporterError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be written as ONNX: {first_line(error)}; models with "
            "attention of their own kind are not supported."
        ) from error
    except ImportError as error:
        raise UserError(f"ONNX needs packages ({error}): pip install onnx onnxscript onnxruntime") from error
    with torch.no_grad():
        expected = module(*asked)
    found = torch.from_numpy(_Session(file)(*(tensor.numpy() for tensor in asked)))
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(f"{file} does not compute what the model does: they differ by {difference:.3g}.")
    return difference


@contextmanager
def _quiet_export() -> Any:
    """The exporter reports its progress on stdout and each of its optimisations on the log."""
    loud = logging.getLogger("onnxscript"), logging.getLogger("onnx_ir"), logging.getLogger("torch.onnx")
    levels = [log.level for log in loud]
    for log in loud:
        log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        for log, level in zip(loud, levels, strict=True):
            log.setLevel(level)


class _Session:
    """A graph of one output, called with its inputs in order."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.names = [entry.name for entry in self.session.get_inputs()]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        return self.session.run(None, dict(zip(self.names, arrays, strict=True)))[0]


class OnnxModel:
    """The files of `export` in ONNX Runtime on the CPU, with the two verbs of the torch model.

    Args:
        folder: of `export`.
    """

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoConfig, GenerationConfig

        check_onnxruntime()
        folder = Path(folder)
        files = [name for name in (CLASSIFIER, ENCODER, DECODER) if (folder / name).is_file()]
        if CLASSIFIER not in files and len(files) < 2:
            raise UserError(
                f"{folder} has neither {CLASSIFIER} nor {ENCODER} and {DECODER}: write it by lmtools export."
            )
        self.config = AutoConfig.from_pretrained(folder)
        self.sessions: Mapping[str, _Session] = {name: _Session(folder / name) for name in files}
        self.generator = None
        if ENCODER in files:
            self.generator = _generator(self.config, GenerationConfig.from_pretrained(folder), self.sessions)

    def logits(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """float[rows, classes] of a classifier; without `token_type_ids` a row is one sentence."""
        session = self.sessions[CLASSIFIER]
        asked = [input_ids, attention_mask]
        if _SEGMENTS in session.names:
            asked.append(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        return torch.from_numpy(session(*(tensor.numpy() for tensor in asked)))

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
            input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, use_cache=False, **options
        )


def _generator(config: PreTrainedConfig, generation: GenerationConfig, sessions: Mapping[str, _Session]) -> Any:
    """transformers' generation around the two graphs of an encoder-decoder."""
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

    class Encoder(nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
            hidden = sessions[ENCODER](input_ids.numpy(), attention_mask.numpy())
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
            self, decoder_input_ids: Tensor, encoder_outputs: BaseModelOutput, attention_mask: Tensor, **_: Any
        ) -> Seq2SeqLMOutput:
            arrays = decoder_input_ids, encoder_outputs[0], attention_mask
            return Seq2SeqLMOutput(logits=torch.from_numpy(sessions[DECODER](*(a.numpy() for a in arrays))))

    return Generator().eval()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer's files beside the graphs."""
    for pattern in ("tokenizer*", "special_tokens_map.json", "*.model", "vocab*", "merges.txt"):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
