"""Two real training steps of a plan on this device, in a process of its own: lack of memory ends that one alone."""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil
import torch

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.planning.build import prepare
from lm_experiments_tools.planning.plan import Plan
from lm_experiments_tools.planning.trace import make_steps

_REFUSED = ("DefaultCPUAllocator", "can't allocate memory", "out of memory")  # in torch's RuntimeErrors


class Trial(NamedTuple):
    """What became of two steps.

    Attributes:
        peak: bytes, of a GPU's tensors or on a CPU of the process beyond what it had before; None: they did not fit.
    """

    peak: int | None


def try_plan(plan: Plan, memory: float | None = None) -> Trial:
    """Make two steps of a plan, of one worker's micro-batches on random tokens.

    Args:
        memory: bytes that the process may take on a CPU, beyond what it has before the model; None: all there is.

    Raises:
        UserError: the model cannot be built, or fails for another reason.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch may hang, or hold a GPU
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_steps, args=(theirs, plan, memory), daemon=True)
    process.start()
    theirs.close()
    try:
        kind, value = ours.recv()
    except EOFError:  # killed, as Linux does where promised memory is not there
        kind, value = "peak", None
    finally:
        process.join()
    if kind == "refused":
        raise UserError(value)
    return Trial(value)


def _steps(out: Connection, plan: Plan, memory: float | None) -> None:
    on_cpu = plan.device == "cpu"
    process = psutil.Process()
    before = process.memory_info()
    if on_cpu and memory is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (int(before.data + memory), hard))
    try:
        step = plan.step
        prepared = prepare(plan.args, step.source, step.target, step.scored, device=torch.device(plan.device))
        make_steps(prepared)
    except (RuntimeError, MemoryError, ValueError, TypeError) as error:
        if is_out_of_memory(error):
            out.send(("peak", None))
        else:
            out.send(("refused", f"{plan.args.model_cls} cannot be tried: {type(error).__name__}: {str(error)[:200]}"))
        return
    except UserError as error:
        out.send(("refused", str(error)))
        return
    if on_cpu:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before.rss
    else:
        peak = torch.cuda.max_memory_allocated()
    out.send(("peak", peak))


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch, numpy or Python raise where memory is refused, on a GPU or (`ulimit -v`) a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED)
