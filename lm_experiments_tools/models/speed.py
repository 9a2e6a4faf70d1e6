"""What `--speed auto` chooses for a run (model class, number format, compiling, settings of the process), and how a
model is compiled: block by block.

Each choice is a flag, is put into the settings before anything is built, and is recorded with them, so that a run goes
on as it began. A flag that is given is never changed: `--speed auto` refuses what cannot be had instead.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from lm_experiments_tools.backends.collective import agreed, on_all
from lm_experiments_tools.backends.launch import cpu_asked, wanted_sharding
from lm_experiments_tools.checkpoint.source import CONFIG, Source, find_base, find_source
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json
from lm_experiments_tools.models.build import SPARSE_KEYS
from lm_experiments_tools.models.presets import read_model_settings
from lm_experiments_tools.tracking.run_directory import settings_in_use

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.training import ExperimentArgs

logger = logging.getLogger(__name__)

Args = TypeVar("Args", bound="ExperimentArgs")

AUTO = "--speed auto"  # where a setting is from that was chosen here
CHOSEN = ("model_cls", "bf16", "compile")
# Classes of ours that compute what transformers' do, from the same weights.
OWN = {
    "transformers:T5ForConditionalGeneration": "modeling_t5:T5ForConditionalGeneration",
    "transformers:BertForPreTraining": "modeling_bert:BertForPreTraining",
}
OWN_FOR_TASKS = {
    ("t5", "encoder-decoder"): "modeling_t5:T5ForConditionalGeneration",
    ("bert", "encoder"): "modeling_bert:BertForSequenceClassification",
}
KINDS = {"t5": "t5", "bert": "bert", "lm_experiments_t5": "t5", "lm_experiments_bert": "bert"}
# Measured on one thread of an EPYC with avx512_bf16, T5 with 2 + 2 layers, 8 x 256/57: bf16 takes 0.99, 0.81, 0.66 and
# 0.43 of fp32's time at d_model 32, 64, 128 and 512.
BF16_WIDTH = 64
# 6 x weights x input tokens of an uncompiled step by its seconds: on one such thread 1.49 for t5-v1_1-small, 4 x
# 512/114, in bf16, 2.3 times as long in fp32; on an A100 1.30 and 1.39 s for base, 128 x 512/114 (nanoT5's README).
RATES = {("cpu", True): 0.55e12, ("cpu", False): 0.24e12, ("cuda", True): 0.7e14, ("cuda", False): 0.6e14}
SAVED = {"cpu": 0.09, "cuda": 0.5}  # of a step's time by compiling, in the same steps
COMPILING_SECONDS = 70  # of t5-v1_1-small by blocks, nothing cached; 11 with a filled cache
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


class _Model(NamedTuple):
    """What config.json says of a model; nothing is known of others than T5 and BERT but their width."""

    kind: str | None = None
    width: int = 0
    weights: int = 0  # of layers and output
    names_attention: bool = False
    dropout: float = 0.0


def choose_speed(
    args: Args, origins: Mapping[str, str], sources: Sequence[Source] = (), *, keeps_process: bool = False
) -> tuple[Args, dict[str, str]]:
    """The same settings and origins with what is chosen put in; called once a run, on every worker, before the rest.

    A run that goes on takes what it recorded, and one that was begun before there was `--speed` goes on with off.

    Args:
        origins: as `cli.parse` returns them: only what is "default" is chosen.
        sources: of `--from_pretrained`, where it was looked for already.
        keeps_process: leave the settings of the process alone, as a library must; see `fast_process`.

    Raises:
        UserError: a flag asks for what is not there.
    """
    origins, before = dict(origins), _recorded(args)
    free = [name for name in CHOSEN if origins.get(name, "default") == "default"]
    if origins.get("speed", "default") == "default":
        args = replace(args, speed="auto" if before is None else before.get("speed", "off"))
    if args.speed == "off":
        if not keeps_process:
            set_up_process(fast=False)
        return args, origins
    device = _device()
    model = _described(args, sources)
    _refuse_absent(args, free, device)
    for name in free:
        value, reason = _CHOICES[name](args, device, model)
        if before is not None and before.get("speed") == "auto" and name in before:
            value, reason = before[name], "as the run was begun"
            if name == "compile" and value and (lacking := lacks_compiler(device)):
                value, reason = False, _uncompiled(lacking, device)
        args = replace(args, **{name: value})
        origins[name] = f"{AUTO}: {reason}"
    if not keeps_process:
        set_up_process(fast=True, device=device)
    return args, origins


def _device() -> str:
    return "cuda" if torch.cuda.is_available() and not cpu_asked() else "cpu"


def check_agreement(args: ExperimentArgs, backend: Backend) -> None:
    """Refuse workers that chose differently, as machines that differ may do, before they wait for each other.

    Raises:
        UserError: naming what differs.
    """
    choices = backend.gather({name: getattr(args, name) for name in ("speed", "model_cls", "bf16")})
    for name, value in choices[0].items():
        others = {str(choice[name]) for choice in choices} - {str(value)}
        if others:
            on_all(backend, lambda: _model_settings(args, ()))  # what one of them lacks is the better reason
            raise agreed(
                UserError(
                    f"{AUTO}: rank 0 takes {name} {value}, others {', '.join(sorted(others))}, as their machines or "
                    f"folders differ: give --{name}, or --speed off."
                )
            )


def describe_speed(args: ExperimentArgs, origins: Mapping[str, str], model: nn.Module) -> str:
    """One line on what runs, and why."""
    if args.speed == "off":
        return "off: plain"
    fast = " with its fast step" if hasattr(model, "use_fast_step") else ""
    own = type(model).__module__.partition(".")[0].startswith("modeling_")
    parts = {
        "model_cls": f"{'our' if own else 'the'} {type(model).__name__}{fast}",
        "bf16": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "compile": "compiled by blocks" if args.compile else "not compiled",
    }
    reasons = {name: origins.get(name, "").removeprefix(f"{AUTO}: ") for name in parts}
    why = {n: f" ({text})" if origins.get(n, "").startswith(AUTO) else "" for n, text in reasons.items()}
    return f"auto: {', '.join(text + why[name] for name, text in parts.items())}; --speed off for plain"


def speed_up(model: nn.Module, args: ExperimentArgs, *, plain: bool = True) -> None:
    """Let a model take its fast step and compile it, as the settings say.

    Args:
        plain: False for a model whose layers are not its own any more (adapters, weights of 8 bits).
    """
    use_fast_step = getattr(model, "use_fast_step", None)
    if args.speed == "auto" and plain and use_fast_step is not None:
        use_fast_step(True)
    if args.compile:
        compile_blocks(model)


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile each transformer block, or a model that has none as a whole; blocks that are alike share their graphs.

    One graph for the first lengths and one for all others, of each kind of block: T5 has four, as the first block of a
    stack makes the bias of the others. What is compiled is kept on disk for the next run.

    Args:
        options: of `torch.compile`.
    """
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from transformers.modeling_layers import GradientCheckpointingLayer

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm_experiments_tools" / "inductor"
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):  # which torch sets when imported
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)  # twice T5's eight graphs
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in blocks or [model]:
        module.compile(**options)


def set_up_process(*, fast: bool, device: str = "cpu") -> None:
    """Settings of this process: without denormal numbers, with large blocks of memory kept, on a GPU TF32.

    Threads that torch starts later take over how denormals are treated; it is to be called before the first product.
    """
    torch.set_flush_denormal(fast)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if fast and device == "cuda" else "highest")
    if fast and device == "cpu":
        _keep_memory()


@contextmanager
def fast_process(args: ExperimentArgs) -> Iterator[None]:
    """`set_up_process` of `--speed auto` while the block runs; with `--speed off` the user's settings hold.

    Threads of torch that start meanwhile keep how denormals are treated, which is a setting of each.
    """
    if args.speed == "off":
        yield
        return
    precision, flushes = torch.get_float32_matmul_precision(), flushes_denormals()
    set_up_process(fast=True, device=_device())
    try:
        yield
    finally:
        torch.set_flush_denormal(flushes)
        torch.set_float32_matmul_precision(precision)


def flushes_denormals() -> bool:
    """True if this thread computes without denormal numbers; torch does not tell."""
    return not bool(torch.tensor(1e-39).mul(0.5))


@cache
def _keep_memory() -> None:
    """Have glibc reuse freed tensors instead of asking the system, which clears each page, for new ones."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def has_bf16(device: str) -> bool:
    """True where the hardware multiplies bfloat16, at more than fp32's speed."""
    if device == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def lacks_compiler(device: str) -> str | None:
    """What torch.compile lacks on this machine; None where it runs."""
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "there is no triton"
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"there is no C++ compiler {compiler}"


def _refuse_absent(args: ExperimentArgs, free: Iterable[str], device: str) -> None:
    """Refuse a flag that was given and cannot be had; `--fp16` and a GPU's bf16 are refused where they are set up."""
    emulated = not (has_bf16("cpu") or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if args.bf16 and "bf16" not in free and device == "cpu" and emulated:
        raise UserError(
            "--bf16: this CPU has no bfloat16 arithmetic, so it would be slower than fp32: leave it out, or add "
            "--speed off to train so all the same."
        )
    if args.compile and "compile" not in free and (lacking := lacks_compiler(device)):
        raise UserError(f"--compile: {lacking}, which torch.compile needs: install it, or leave --compile out.")


def _recorded(args: ExperimentArgs) -> dict[str, Any] | None:
    """Settings of the run that goes on; None for a new one."""
    here, named = Path(args.working_dir), args.resume_path()
    folders = [] if args.model_path is None else [here / args.model_path]
    if named is not None:  # runs/name/last or runs/name/checkpoints/step_000100
        folders += [(here / named).parent, (here / named).parent.parent]
    return next(filter(None, map(settings_in_use, folders)), None)


def _described(args: ExperimentArgs, sources: Sequence[Source]) -> _Model:
    """The model that the settings name; what is wrong with it is said where it is built."""
    try:
        values = _model_settings(args, sources)
    except (UserError, OSError, ValueError):
        return _Model()
    kind = KINDS.get(values.get("model_type"))
    width = values.get("d_model") or values.get("hidden_size") or values.get("n_embd") or (kind and 512) or 0
    inner = values.get("d_ff") or values.get("intermediate_size") or 4 * width
    encoder = values.get("num_layers") or values.get("num_hidden_layers") or 6
    decoder = (values.get("num_decoder_layers") or encoder) if kind == "t5" else 0
    weights = encoder * 4 * width**2 + decoder * 8 * width**2 + (encoder + decoder) * 3 * width * inner
    named = any(values.get(key) is not None for key in (*SPARSE_KEYS, "attn_implementation"))
    weights += width * (values.get("vocab_size") or 2**15)
    dropout = values.get("dropout_rate" if kind == "t5" else "hidden_dropout_prob", 0.1)
    return _Model(kind, width, weights, named, dropout if args.dropout_rate is None else args.dropout_rate)


def _model_settings(args: ExperimentArgs, sources: Sequence[Source]) -> Mapping[str, Any]:
    """Content of the config.json that the settings lead to."""
    here = Path(args.working_dir)
    if args.model_cfg is not None:
        return read_model_settings(here / args.model_cfg if (here / args.model_cfg).is_file() else args.model_cfg)
    weights, named = getattr(args, "from_pretrained", None), args.base_model or args.init_checkpoint
    if weights is not None:  # may be a run directory, whose config.json is of the run
        source = sources[0] if sources else find_source(str(here / weights) if (here / weights).exists() else weights)
        source = find_base(source) if source.is_adapter else source
        if source.path is not None:
            return source.config
    elif named is not None and (here / named / CONFIG).is_file():
        return read_json(here / named / CONFIG)
    from transformers import PreTrainedConfig

    return PreTrainedConfig.get_config_dict(weights or named)[0]


# ---- the choices: value, and why ------------------------------------------------------------------------------------
def _choose_class(args: ExperimentArgs, device: str, model: _Model) -> tuple[str | None, str]:
    if isinstance(args, FinetuningArgs):
        own = OWN_FOR_TASKS.get((model.kind, args.model_type))
        if args.quantize or args.peft or args.device_map or args.inference_dtype:
            return args.model_cls, "its weights are held as transformers and peft do"
    else:
        own = OWN.get(args.model_cls)
        own = own if own is not None and own.startswith(f"modeling_{model.kind}:") else None
    if own is not None and model.names_attention:
        return args.model_cls, "its configuration names an attention"
    return own or args.model_cls, "the same weights and files" if own else "there is none of ours"


def _choose_bf16(args: ExperimentArgs, device: str, model: _Model) -> tuple[bool, str]:
    name = "this GPU" if device == "cuda" else "this CPU"
    if args.fp16:
        return False, "--fp16 was given"
    if wanted_sharding() == "DEEPSPEED":
        return False, "DeepSpeed's settings decide"
    if not has_bf16(device):
        cost = "with TF32 where there is" if device == "cuda" else "about 2 times slower for a model of usual size"
        return False, f"{name} has no bfloat16: {cost}"
    if device == "cpu" and model.width < BF16_WIDTH:
        return False, f"layers of less than {BF16_WIDTH} features are not faster in bf16"
    return True, f"{name} has it"


def _choose_compile(args: ExperimentArgs, device: str, model: _Model) -> tuple[bool, str]:
    if model.kind is None or args.gradient_checkpointing or wanted_sharding() or args.validate_only:
        return False, "only pre-training of T5 and BERT is, without sharding and recomputation"
    if isinstance(args, FinetuningArgs):
        return False, "how long fine-tuning takes is not known yet"
    if lacking := lacks_compiler(device):
        return False, _uncompiled(lacking, device)
    if device == "cpu" and model.dropout:  # 3.58 s a step of t5-v1_1-small with 0.1 against 1.82 uncompiled
        return False, "compiled dropout is slow on a CPU"
    tokens = args.iters * args.rows_per_worker() * args.input_seq_len
    threads = torch.get_num_threads() if device == "cpu" else 1
    bf16 = args.bf16 or args.fp16
    seconds = 6 * model.weights * tokens / (RATES[device, bf16] * threads)
    pays = SAVED[device] * seconds > 2 * COMPILING_SECONDS
    return pays, f"about {_minutes(seconds)} of computing {'pay' if pays else 'do not pay'} for it"


def _uncompiled(lacking: str, device: str) -> str:
    return f"{lacking}, so each step takes about {1 / (1 - SAVED[device]):.2g} times as long"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else "hours"


_CHOICES = {"model_cls": _choose_class, "bf16": _choose_bf16, "compile": _choose_compile}
