"""Helpers of t5-experiments' `lm_experiments_tools.utils`."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import torch

from lm_experiments_tools.ancestor.notice import notice
from lm_experiments_tools.files import dump_json
from lm_experiments_tools.names import resolve_name
from lm_experiments_tools.tracking.run_directory import git_output

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
_LOG_BYTES = 100 * 2**20


def get_cls_by_name(name: str) -> type:
    """Import the class named by `module:Class`. Raises UserError if there is none."""
    return resolve_name(name, object)


def get_git_hash_commit() -> str:
    """Return the git commit of the current folder; "" outside a repository."""
    return git_output("rev-parse", "HEAD").decode("ascii", "replace").strip()


def get_git_diff() -> str:
    """Return the uncommitted changes of the current folder as a diff; "" outside a repository."""
    return git_output("diff", "HEAD", "--binary").decode("utf-8", "replace")


def get_fn_param_names(fn: Callable) -> list[str]:
    """Return the names of a function's parameters, without *args and **kwargs."""
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(fn).parameters.values() if p.kind not in collecting]


def _horovod() -> Any:
    """Horovod's torch module if the program has initialised it, else None."""
    module = sys.modules.get("horovod.torch")
    return module if module is not None and module.is_initialized() else None


def _accelerate() -> Any:
    """Accelerate's PartialState if the program has made an Accelerator, else None."""
    module = sys.modules.get("accelerate.state")
    return module.PartialState() if module is not None and module.PartialState._shared_state else None


def _torch_job() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def get_distributed_rank() -> int:
    """Return the rank of this process; 0 without a distributed job."""
    if (hvd := _horovod()) is not None:
        return hvd.rank()
    if (state := _accelerate()) is not None:
        return state.process_index
    return torch.distributed.get_rank() if _torch_job() else 0


def rank_0(fn: Callable) -> Callable:
    """Decorator: call the function on rank 0 only; other ranks get None."""

    @functools.wraps(fn)
    def on_rank_0(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if get_distributed_rank() == 0 else None

    return on_rank_0


def wait_for_everyone() -> None:
    """Wait until every process of the job has called this function."""
    if (hvd := _horovod()) is not None:
        hvd.barrier()
    elif (state := _accelerate()) is not None:
        state.wait_for_everyone()
    elif _torch_job():
        torch.distributed.barrier()


def collect_run_configuration(
    args: Any, env_vars: Sequence[str] = ("CUDA_VISIBLE_DEVICES",), accelerator: Any = None
) -> dict[str, Any]:
    """Return the arguments with environment variables, machine and git commit, for config.json."""
    hvd, state = _horovod(), _accelerate()
    config = {**vars(args), "ENV": {name: os.environ.get(name, "") for name in env_vars}}
    config["HVD_INIT"] = hvd is not None
    if hvd is not None:
        config["HVD_SIZE"] = hvd.size()
    if state is not None:
        config["accelerate"] = {"num_processes": state.num_processes, "distributed_type": state.distributed_type.value}
    if accelerator is not None:
        config["accelerate"]["mixed_precision"] = str(accelerator.mixed_precision)
    return {**config, "MACHINE": platform.node(), "COMMIT": get_git_hash_commit()}


def prepare_run(
    args: Any,
    logger: Any = None,
    logger_fmt: str = LOG_FORMAT,
    add_file_logging: bool = True,
    accelerator: Any = None,
) -> None:
    """Create the run directory `args.model_path` with config.json, git.diff and a log file."""
    notice("prepare_run", "the Trainer, which makes the run directory and logs/rankN.log itself")
    if args.model_path is None:
        if logger is not None and get_distributed_rank() == 0:
            logger.warning("model_path is not set: config, logs and checkpoints will not be saved.")
        return
    run = Path(args.model_path)
    if get_distributed_rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        config = collect_run_configuration(args, accelerator=accelerator)
        (run / "config.json").write_text(dump_json(config, indent=4), encoding="utf-8")
        (run / "git.diff").write_text(get_git_diff(), encoding="utf-8")
    wait_for_everyone()
    if logger is not None and add_file_logging:
        name = f"{time.strftime('%Y.%m.%d_%H:%M:%S')}_rank_{get_distributed_rank()}.log"
        file = RotatingFileHandler(run / name, mode="w", maxBytes=_LOG_BYTES, backupCount=2, encoding="utf-8")
        target = getattr(logger, "logger", logger)  # under an adapter, as Accelerate's
        file.setLevel(target.level)
        file.setFormatter(logging.Formatter(logger_fmt))
        target.addHandler(file)


def let_cpus_train() -> None:
    """Make `torch.cuda.set_device` do nothing on machines without a GPU.

    It is the first torch call of t5-experiments' programs, which otherwise could not train on CPUs.
    """
    set_device = torch.cuda.set_device

    @functools.wraps(set_device)
    def set_device_if_any(device: Any) -> None:
        if torch.cuda.is_available():
            set_device(device)
        else:
            logger.info("torch.cuda.set_device(%s) has no effect: there is no GPU, training is on CPUs", device)

    torch.cuda.set_device = set_device_if_any
