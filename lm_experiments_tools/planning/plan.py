"""The plan of a run from its settings alone: what it will hold in memory, part by part; loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.checkpoint.manifest import verify_model
from lm_experiments_tools.checkpoint.source import find_source
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.data.objectives.span_corruption import plan_spans
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.models.presets import read_model_settings
from lm_experiments_tools.planning.activations import Step
from lm_experiments_tools.planning.offload import REUSED, Offload, offload_of
from lm_experiments_tools.planning.optimizer_state import State, state_of
from lm_experiments_tools.planning.peak import Fixed, Peak, walk
from lm_experiments_tools.planning.shapes import KINDS, Model, describe

if TYPE_CHECKING:
    from lm_experiments_tools.config.planning import PlanningArgs
    from lm_experiments_tools.config.training import ExperimentArgs

OWN = {
    "t5": ("transformers:T5ForConditionalGeneration", "modeling_t5:T5ForConditionalGeneration"),
    "bert": ("transformers:BertForPreTraining", "modeling_bert.modeling_bert:BertForPreTraining"),
}
# Of fine-tuning: transformers' and ours.
OWN_TUNED = {
    "t5": OWN["t5"],
    "bert": ("transformers:BertForSequenceClassification", "modeling_bert:BertForSequenceClassification"),
}
_NAMES_ATTENTION = ("sparse_config_cls", "sparse_attention", "attn_implementation")
_FUSION = 128 * 2**20  # bytes of Horovod's fusion buffer
_SENTINELS = 10**6  # how many a vocabulary has does not matter here
_LORA = {"t5": ("q", "v"), "bert": ("query", "value")}
_ATTENTION_NAMES = {"q", "k", "v", "o", "query", "key", "value"}
_NAMES = {**{name: name for name in ("q", "k", "v", "o", "wo")}, "query": "q", "key": "k", "value": "v", "dense": "wo"}
FREEZABLE = ("embeddings", "encoder", "decoder", "head")
_PROCESS = 0.7 * 2**30  # bytes of a Python process with torch and transformers


@dataclass(frozen=True)
class Plan:
    """A run's memory for one worker, bytes, by the closed form."""

    args: ExperimentArgs
    model: Model
    step: Step
    fixed: Fixed
    peak: Peak
    trained: int  # parameters
    state: State
    device: str
    notes: tuple[str, ...]
    offload: Offload | None = None

    def weights_as(self, kind: str) -> float:
        """Bytes of all weights for inference in fp32, bf16, int8 or nf4."""
        return held_weights(self.model, kind)

    def cache(self, rows: int, beams: int, length: int, size: int) -> float:
        """Bytes of keys and values while `length` tokens are written for `rows` inputs, values of `size` bytes."""
        places = self.step.source + length
        return 2 * size * rows * beams * places * self.model.decoder_layers * self.model.inner

    def checkpoint(self) -> float:
        """Bytes on disk: weights that are saved, in float32, and the optimizer's state."""
        saved = self.model.parameters() if self.step.adapted is None else self.trained
        return 4 * saved + self.state.size

    def host(self) -> float:
        """Bytes of main memory, roughly: the process, on a CPU the plan itself, copies while a checkpoint is saved."""
        copies = self.checkpoint() if self.args.save_in_background and self.args.model_path else 0
        offloaded = 0 if self.offload is None else self.offload.held
        return _PROCESS + copies + offloaded + (self.peak.total if self.device == "cpu" else 0)


def make_plan(
    args: ExperimentArgs, planning: PlanningArgs, origins: Mapping[str, str], config: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of these settings.

    Args:
        origins: of the settings, as `cli.parse` gives them: what `--speed auto` may choose.
        config: the model's config.json, where it is known.

    Raises:
        UserError: the model is not described, or is neither T5 nor BERT.
    """
    config = model_settings(args) if config is None else config
    if args.dropout_rate is not None:
        names = ("dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob")
        config = {**config, **dict.fromkeys(names, args.dropout_rate)}
    device = device_of(planning.device)
    args = settled(args, origins, config, device)
    model = describe(config)
    if model.kind == "bert" and isinstance(args, FinetuningArgs):
        model = replace(model, labels=len(config.get("id2label") or ()) or 2)
    step, notes = _step(args, model, config, device)
    trained = _trained(args, model)
    options = dict(option.partition("=")[::2] for option in args.optimizer_options)
    momentum = options.get("momentum", "0") not in ("0", "0.0")
    state = state_of(args.optimizer, model, trained, momentum=momentum, beta1="beta1" in options)
    fixed, offload = _fixed(args, planning, model, trained, state), None
    if planning.offload != "none" and device == "cuda":
        offload = offload_of(args, planning, model, trained, state.size)
        if offload.value == 2:
            notes.append("16-bit copies of weights in the activations do not exist: DeepSpeed casts the model itself")
        fixed = _left(fixed, offload.value / 4, whole=planning.offload == "all")
    buckets = planning.workers > 1 and planning.sharding == "none" and args.backend != "horovod"
    peak = walk(model, step, fixed, args.gradient_accumulation_steps > 1 or buckets, trained)
    return Plan(args, model, step, fixed, peak, trained, state, device, tuple(notes), offload)


def model_settings(args: ExperimentArgs) -> Mapping[str, Any]:
    """The config.json that the settings lead to. Raises UserError."""
    here, weights = Path(args.working_dir), getattr(args, "from_pretrained", None)
    if args.model_cfg is not None:
        return read_model_settings(here / args.model_cfg if (here / args.model_cfg).is_file() else args.model_cfg)
    name = weights or args.base_model or args.init_checkpoint
    if name is None:
        raise UserError("no model is named: give --model_cfg, a file or a preset such as t5-small, or --base_model")
    if (here / name / "config.json").is_file():
        verify_model(here / name, ["config.json"])
        return read_json(here / name / "config.json")
    from transformers import PreTrainedConfig  # seconds, for what may be in the cache of the Hub

    try:
        return PreTrainedConfig.get_config_dict(name)[0]
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: there is no config.json that describes the model; give --model_cfg") from error


def device_of(asked: str) -> str:
    """cpu or cuda: the device asked for, otherwise a GPU that PyTorch can use."""
    if asked != "auto":
        return asked
    if os.environ.get("ACCELERATE_USE_CPU") or not has_nvidia_driver():
        return "cpu"
    import torch  # seconds, which a machine without a driver is spared

    return "cuda" if torch.cuda.is_available() else "cpu"


def has_nvidia_driver() -> bool:
    """True if a driver serves GPUs here, all of which CUDA_VISIBLE_DEVICES may hide."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # the latter in Windows' Linux


def with_checkpoint(args: ExperimentArgs) -> ExperimentArgs:
    """The same settings with a run directory in `--from_pretrained` replaced by its checkpoint. Raises UserError."""
    name = getattr(args, "from_pretrained", None)
    if name is None or not (folder := Path(args.working_dir) / name).is_dir():
        return args
    return replace(args, from_pretrained=str(find_source(str(folder)).path.absolute()))


def settled(
    args: ExperimentArgs, origins: Mapping[str, str], config: Mapping[str, Any], device: str
) -> ExperimentArgs:
    """The settings with what `--speed auto` chooses of class and number format, as `models.speed` does."""
    kind, tuned = KINDS.get(str(config.get("model_type"))), isinstance(args, FinetuningArgs)
    known, ours = (OWN_TUNED if tuned else OWN).get(kind, (args.model_cls, args.model_cls))
    if args.speed == "off":
        return replace(args, model_cls=args.model_cls or known)
    names_attention = any(config.get(name) is not None for name in _NAMES_ATTENTION)
    free = {name for name in ("model_cls", "bf16") if origins.get(name, "default") == "default"}
    adapted = any(getattr(args, name, None) for name in ("peft", "quantize", "device_map", "inference_dtype"))
    if "model_cls" in free and not names_attention and not adapted and (tuned or args.model_cls == known):
        args = replace(args, model_cls=ours)
    args = replace(args, model_cls=args.model_cls or known)
    if "bf16" in free and not args.fp16:
        width = config.get("d_model") or config.get("hidden_size") or 0
        args = replace(args, bf16=device == "cuda" or (_cpu_has_bf16() and int(width) >= 64))
    return args


def _cpu_has_bf16() -> bool:
    flags = Path("/proc/cpuinfo")
    text = flags.read_text(encoding="utf-8") if flags.is_file() else ""
    return "avx512_bf16" in text or "amx_bf16" in text


def _step(args: ExperimentArgs, model: Model, config: Mapping[str, Any], device: str) -> tuple[Step, list[str]]:
    """One micro-batch of these settings, and what is to be said of it."""
    name, notes = args.model_cls or "", []
    own = name.startswith("modeling_")
    adapter = getattr(args, "peft", None)
    code = ("fast" if args.speed == "auto" and not adapter else "own") if own else "transformers"
    if name and not own and not name.startswith("transformers:"):
        notes.append(f"--model_cls {name} is counted as a {model.kind} of transformers: the trace knows better")
    sparse = config.get("sparse_config_cls") or config.get("sparse_attention")
    attention = config.get("attn_implementation") or ("block_sparse" if sparse else "sdpa")
    if attention not in ("eager", "sdpa"):
        notes.append(f"attention {attention} is counted as dense: the trace knows better")
        attention = "sdpa"
    if args.compile:
        notes.append("compiled blocks keep less than is counted here")
    if device == "cuda":
        notes.append("not measured on a GPU: kernels' work space, CUDA's context and fragments are not in it")
    unknown = set(getattr(args, "freeze", ())) - set(FREEZABLE)
    if unknown:
        notes.append(f"--freeze {' '.join(sorted(unknown))} is not counted: the trace knows what has such a name")
    mixed = args.bf16 or args.fp16
    source, target = lengths(args, model)
    scored = _scored(args, model)
    step = Step(args.batch_size, source, target, mixed, code, attention, args.gradient_checkpointing, device, scored)
    frozen = frozenset(getattr(args, "freeze", ())) & set(FREEZABLE)
    dropout = adapter == "lora" and args.lora_dropout > 0
    adapted = None if adapter is None else frozenset(_adapted(args, model))
    return replace(step, adapted=adapted, adapter_dropout=dropout, frozen=frozen), notes


def lengths(args: ExperimentArgs, model: Model) -> tuple[int, int]:
    """Tokens of a source and of a target, at most; 0 where there is no decoder."""
    if not model.decoder_layers:
        return args.input_seq_len, 0
    if getattr(args, "task", "") == "span_corruption":
        counts = plan_spans(args.input_seq_len, args.noise_density, args.mean_noise_span_length, _SENTINELS)
        return args.input_seq_len, counts.targets_length
    return args.input_seq_len, getattr(args, "target_seq_len", args.input_seq_len)


def _scored(args: ExperimentArgs, model: Model) -> int | None:
    """Tokens of a micro-batch whose words BERT scores; None: all."""
    if isinstance(args, FinetuningArgs):
        return 0
    if model.kind != "bert" or getattr(args, "mlm_positions", "all") == "all":
        return None
    if hasattr(args, "most_predictions"):
        return args.batch_size * args.most_predictions()
    tokens, part = args.batch_size * args.input_seq_len, args.mlm_probability
    return int(tokens * part + 6 * (tokens * part * (1 - part)) ** 0.5 + 1)


def _adapted(args: ExperimentArgs, model: Model) -> set[str]:
    """The layers beside which LoRA's matrices are, by the names that T5 gives them."""
    if args.peft != "lora":
        return set()
    targets = args.lora_targets or _LORA[model.kind]
    if targets == ("all-linear",):
        return {"q", "k", "v", "o", "wi", "wo"}
    return {_NAMES.get(name, "o" if "attention" in name else "wo" if "output" in name else "wi") for name in targets}


def _trained(args: ExperimentArgs, model: Model) -> int:
    """Parameters that are trained: all, or those of an adapter."""
    kind = getattr(args, "peft", None)
    if kind is None:
        return model.parameters() - model.frozen(getattr(args, "freeze", ()))
    if kind == "lora":
        attentions = model.encoder_layers + 2 * model.decoder_layers
        layers = model.encoder_layers + model.decoder_layers
        targets = args.lora_targets or _LORA[model.kind]
        if targets == ("all-linear",):
            in_attention, others = 4, (3 if model.gated else 2)
        else:
            in_attention = sum(name in _ATTENTION_NAMES for name in targets)
            others = len(targets) - in_attention
        wide = layers * others * (model.width + model.wide)
        return args.lora_r * (attentions * in_attention * (model.width + model.inner) + wide)
    if kind == "prefix_tuning":
        return 2 * args.num_virtual_tokens * (model.decoder_layers or model.encoder_layers) * model.inner
    return args.num_virtual_tokens * args.num_prompts * model.width


def held_weights(model: Model, kind: str) -> float:
    """Bytes of all weights in fp32, bf16, int8, nf4 or fp4; tables, output layer and T5's wo stay float32 in the last
    three, as transformers leaves them."""
    count = model.parameters()
    if kind in ("fp32", "bf16", "fp16"):
        return count * (4 if kind == "fp32" else 2)
    layers = model.encoder_layers + model.decoder_layers
    attentions = model.encoder_layers + 2 * model.decoder_layers
    inner = 4 * attentions * model.width * model.inner
    wide = layers * (3 if model.gated else 2) * model.width * model.wide
    if model.kind == "t5":
        wide -= layers * model.width * model.wide
    quantized = inner + wide + (model.width**2 if model.kind == "bert" else 0)  # and the pooler
    return 4 * (count - quantized) + quantized * (1 if kind == "int8" else 0.5 + 4 / 64)


def _fixed(args: ExperimentArgs, planning: PlanningArgs, model: Model, trained: int, state: State) -> Fixed:
    """Weights, gradients, state and what is sent, of one worker."""
    workers, sharding = planning.workers, planning.sharding
    whole = sharding in ("zero3", "fsdp")
    quantized = getattr(args, "quantize", None)
    weights = held_weights(model, quantized) if quantized else 4.0 * model.parameters()
    if getattr(args, "peft", None):
        weights += 4 * trained
    gradients, optimizer = 4.0 * trained, state.size
    sent = 0.0
    if whole:  # two blocks are gathered at once: the one that computes and the next
        sent = 2 * 4 * max(model.encoder_block, model.decoder_block if model.decoder_layers else 0, model.table)
        if sharding == "zero3":  # which keeps them gathered until the backward pass
            sent = max(sent, 4 * min(model.parameters(), REUSED))
        weights /= workers
    elif workers > 1:
        sent = _communication(args, gradients)
    if args.reproducible != "off" and sharding == "none":  # in place of what Horovod or DDP send from
        sent = 8.0 * trained
    if whole or sharding == "zero2":
        gradients /= workers
    if sharding != "none":
        optimizer /= workers
    return Fixed(weights, gradients, optimizer, state.update / (workers if whole else 1), sent)


def _left(fixed: Fixed, share: float, *, whole: bool) -> Fixed:
    """Leave on the GPU what offloading does: values of `share` of float32's size, and weights unless all are away."""
    weights = 0.0 if whole else share * fixed.weights
    return Fixed(weights, share * fixed.gradients, 0.0, 0.0, share * fixed.communication)


def _communication(args: ExperimentArgs, gradients: float) -> float:
    """Buffers that gradients are sent from: Horovod fuses some at a time, of DDP's buckets they are views and so exist
    all the time."""
    half = gradients / 2 if args.fp16_allreduce else 0
    return half + (min(_FUSION, gradients) if args.backend == "horovod" else 0)
