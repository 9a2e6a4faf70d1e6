"""The flag `--speed auto`: choose model class, bf16 and compilation for this machine; compile models block by block.

The chosen values fill in flags before anything is built. They are recorded with the settings, so that a resumed run
keeps them. A flag that the user gives is never changed; if the machine cannot do what it asks for, the run stops with
an error.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lm_experiments_tools.backends.launch import cpu_asked, wanted_processes, wanted_sharding
from lm_experiments_tools.checkpoint.source import CONFIG, find_base, find_source
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.flags import AUTO as NEW_RUN
from lm_experiments_tools.config.lengths import in_updates
from lm_experiments_tools.config.phases import phases_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import read_json, user_cache
from lm_experiments_tools.models.build import SPARSE_KEYS
from lm_experiments_tools.models.presets import read_model_settings
from lm_experiments_tools.modules.devices import has_bf16, lacks_triton
from lm_experiments_tools.modules.inspection import base_of
from lm_experiments_tools.tracking.run_directory import check_script, settings_in_use

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import ExperimentArgs

logger = logging.getLogger(__name__)

Args = TypeVar("Args", bound="ExperimentArgs")

AUTO = "--speed auto"  # begins the origin of a chosen setting
CHOSEN = ("model_cls", "bf16", "compile")
# Our classes that compute the same as transformers', from the same weights.
OWN = {
    "transformers:T5ForConditionalGeneration": "modeling_t5:T5ForConditionalGeneration",
    "transformers:BertForPreTraining": "modeling_bert:BertForPreTraining",
}
OWN_FOR_TASKS = {
    ("t5", "encoder-decoder"): "modeling_t5:T5ForConditionalGeneration",
    ("bert", "encoder"): "modeling_bert:BertForSequenceClassification",
}
KINDS = {"t5": "t5", "bert": "bert", "lm_experiments_t5": "t5", "lm_experiments_bert": "bert"}
BF16_WIDTH = 64  # features of a layer from which bf16 is faster on a CPU
MIN_TOKENS = {"cpu": 10**7, "cuda": 10**8}  # input tokens of one worker from which compilation pays
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def choose_speed(
    args: Args, origins: Mapping[str, str], *, keeps_process: bool = False
) -> tuple[Args, dict[str, str]]:
    """Fill in the flags that `--speed auto` chooses: `--model_cls`, `--bf16` and `--compile`. Raises UserError.

    Every worker calls this first. A resumed run keeps its recorded choices. `origins` tells where each setting comes
    from, as `cli.parse` returns it: only settings from "default" are chosen. With `keeps_process`, for a library,
    options of the whole process are not changed (see `set_up_process`).
    """
    origins, before = dict(origins), _recorded(args)
    free = [name for name in CHOSEN if origins.get(name, "default") == "default"]
    if origins.get("speed", "default") == "default":
        args = replace(args, speed=before.get("speed", "off") if before else args.speed)
    device = _device()
    if args.speed == "auto":
        _refuse_unavailable(args, free, device)
        config = _read_config(args)
        for name in free:
            value, reason = _CHOICES[name](args, device, config)
            if before.get("speed") == "auto" and name in before:
                lacking = lacks_compiler(device) if name == "compile" and before[name] else None
                value, reason = (False, lacking) if lacking else (before[name], "as the run recorded")
            args = replace(args, **{name: value})
            origins[name] = f"{AUTO}: {reason}"
    if not keeps_process:
        set_up_process(fast=args.speed == "auto", device=device)
    return args, origins


def _device() -> str:
    return "cuda" if torch.cuda.is_available() and not cpu_asked() else "cpu"


def describe_speed(args: ExperimentArgs, origins: Mapping[str, str], model: nn.Module) -> str:
    """Describe in one line for the log what `--speed auto` chose, and why (from the origins of the settings)."""
    if args.speed == "off":
        return "off"
    is_own = type(model).__module__.partition(".")[0].startswith("modeling_")
    parts = {
        "model_cls": f"{'our' if is_own else 'the'} {type(model).__name__}",
        "bf16": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "compile": "compiled by blocks" if args.compile else "not compiled",
    }
    reasons = {name: origins.get(name, "") for name in parts}
    why = {n: f" ({r.removeprefix(f'{AUTO}: ')})" if r.startswith(AUTO) else "" for n, r in reasons.items()}
    return f"auto: {', '.join(text + why[name] for name, text in parts.items())}; --speed off: none of these"


def speed_up(model: nn.Module, args: ExperimentArgs, *, plain: bool = True) -> None:
    """Enable a model's fused training path for `--speed auto` (`plain`: its layers are its own), and compile it."""
    use_fast_step = getattr(model, "use_fast_step", None)
    if args.speed == "auto" and plain and use_fast_step is not None:
        use_fast_step(True)
    base = base_of(model)
    if args.speed == "off" and not args.compile and hasattr(base, "compiles_loss"):
        base.compiles_loss = False
    if args.compile:
        compile_blocks(model)


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile each transformer block of a model, with a disk cache that makes the next run start faster.

    Modules name other parts to compile in `compiled_parts`. A model without blocks is compiled as a whole.
    Blocks of the same shape share two compiled graphs: one for the first input length, one for all other lengths.
    `options` are those of `torch.compile`.
    """
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from transformers.modeling_layers import GradientCheckpointingLayer

    is_default = os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir())  # torch sets it
    if is_default and (folder := user_cache()) is not None:  # otherwise torch's, a temporary folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)  # twice T5's eight graphs
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # DDP would split each block's graph at the bounds of its buckets. Gradients are sent block by block as it is. FSDP
    # shards each block after this, and its hooks run before and after the block's graph.
    torch._dynamo.config.optimize_ddp = torch._dynamo.config.optimize_ddp and not blocks
    parts = [getattr(module, name) for module in model.modules() for name in getattr(module, "compiled_parts", ())]
    for module in [*blocks, *parts] if blocks else [model]:
        module.compile(**options)


def set_up_process(*, fast: bool, device: str = "cpu") -> None:
    """Set options of the whole process for speed: flush denormals, use TF32 on a GPU, reuse freed memory on a CPU.

    Call it before the first matrix product: threads that torch starts inherit the flushing of denormals. Without
    `fast` torch's defaults are restored, except for the reuse of freed memory.
    """
    torch.set_flush_denormal(fast)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if fast and device == "cuda" else "highest")
    if fast and device == "cpu":
        _keep_memory()


@contextmanager
def fast_process(args: ExperimentArgs) -> Iterator[None]:
    """Inside a `with` block, apply `set_up_process` if `--speed auto` is set; the settings are restored afterwards."""
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
    """True if this thread flushes denormal numbers to zero; torch has no getter."""
    return not bool(torch.tensor(1e-39).mul(0.5))


@cache
def _keep_memory() -> None:
    """Have glibc reuse freed memory instead of returning it to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def lacks_compiler(device: str) -> str | None:
    """Reason why torch.compile cannot run on this machine; None if it can."""
    if device == "cuda":
        return lacks_triton()
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"there is no C++ compiler {compiler}"


def _refuse_unavailable(args: ExperimentArgs, free: Sequence[str], device: str) -> None:
    """Refuse `--compile` that the machine cannot do; `--fp16` and a GPU's bf16 are refused where they are set up."""
    if args.compile and "compile" not in free and (lacking := lacks_compiler(device)):
        raise UserError(f"--compile: {lacking}: install it, or leave --compile out.")


def _recorded(args: ExperimentArgs) -> dict[str, Any]:
    """The settings of the run that is resumed; empty for a new one."""
    here, named = Path(args.working_dir), args.resume_path()
    folders = [] if args.model_path in (None, NEW_RUN) else [here / args.model_path]
    if named is not None:  # runs/name/last or runs/name/checkpoints/step_000100
        folders += [(here / named).parent, (here / named).parent.parent]
    found = next(filter(None, map(settings_in_use, folders)), {})
    if folders and named is None:
        check_script(Path(args.model_path), found, vars(args))
    return found


def _read_config(args: ExperimentArgs) -> Mapping[str, Any]:
    """The values of the model's configuration; empty if it cannot be read, which the build of the model reports."""
    try:
        return _config_values(args)
    except (UserError, OSError, ValueError):
        return {}


def _config_values(args: ExperimentArgs) -> Mapping[str, Any]:
    here = Path(args.working_dir)
    if args.model_cfg is not None:
        return read_model_settings(here / args.model_cfg if (here / args.model_cfg).is_file() else args.model_cfg)
    weights, named = getattr(args, "from_pretrained", None), args.base_model or args.init_checkpoint
    if weights is not None:  # may be a run directory, whose config.json is of the run
        source = find_source(str(here / weights) if (here / weights).exists() else weights)
        source = find_base(source) if source.is_adapter else source
        if source.path is not None:
            return source.config
    elif named is not None and (here / named / CONFIG).is_file():
        return read_json(here / named / CONFIG)
    from transformers import PreTrainedConfig

    values, _ = PreTrainedConfig.get_config_dict(weights or named)
    return values


# ---- the rules: value and reason ------------------------------------------------------------------------------------
def _choose_class(args: ExperimentArgs, device: str, config: Mapping[str, Any]) -> tuple[str | None, str]:
    kind = KINDS.get(config.get("model_type"))
    if isinstance(args, FinetuningArgs):
        own = OWN_FOR_TASKS.get((kind, args.model_type))
        if args.quantize or args.peft or args.device_map:
            return args.model_cls, "adapters and low-bit weights are transformers' and peft's"
    else:
        own = OWN.get(args.model_cls)
        own = own if own is not None and own.startswith(f"modeling_{kind}:") else None
    if own is not None and any(config.get(key) is not None for key in (*SPARSE_KEYS, "attn_implementation")):
        return args.model_cls, "its configuration names an attention"
    return own or args.model_cls, "the same weights and files" if own else "there is none of ours"


def _choose_bf16(args: ExperimentArgs, device: str, config: Mapping[str, Any]) -> tuple[bool, str]:
    if args.fp16:
        return False, "--fp16 was given"
    if wanted_sharding() == "DEEPSPEED":
        return False, "DeepSpeed's settings decide"
    if not has_bf16(device):
        return False, f"this {'GPU' if device == 'cuda' else 'CPU'} has no bfloat16"
    default = 512 if config.get("model_type") in KINDS else 0
    width = config.get("d_model") or config.get("hidden_size") or config.get("n_embd") or default
    if device == "cpu" and width < BF16_WIDTH:
        return False, f"layers of less than {BF16_WIDTH} features are not faster in bf16"
    return True, "the hardware has it"


def _choose_compile(args: ExperimentArgs, device: str, config: Mapping[str, Any]) -> tuple[bool, str]:
    kind = KINDS.get(config.get("model_type"))
    if isinstance(args, FinetuningArgs) or kind is None or args.validate_only:
        return False, "only pre-training of T5 and BERT is compiled"
    if args.gradient_checkpointing or wanted_sharding() == "DEEPSPEED":
        return False, "DeepSpeed and recomputation are not compiled"
    if lacking := lacks_compiler(device):
        return False, lacking
    workers = wanted_processes()[0]
    phases = [in_updates(phase, workers) for phase in phases_of(args)]
    dropout = config.get("dropout_rate" if kind == "t5" else "hidden_dropout_prob", 0.1)
    if device == "cpu" and any(dropout if phase.dropout_rate is None else phase.dropout_rate for phase in phases):
        return False, "compiled dropout is slow on a CPU"
    tokens = sum(phase.iters * phase.global_batch_size(workers) * phase.input_seq_len for phase in phases) // workers
    pays = tokens >= MIN_TOKENS[device]
    return pays, f"{tokens:,} tokens of each worker are {'enough' if pays else 'too few'} to save time by it"


_CHOICES = {"model_cls": _choose_class, "bf16": _choose_bf16, "compile": _choose_compile}
