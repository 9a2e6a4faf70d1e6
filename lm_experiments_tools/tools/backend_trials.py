"""Try each distributed backend (for `lmtools doctor`): two processes sum a vector under the backend's launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_LAUNCHERS = ("ACCELERATE_", "HOROVOD_", "FSDP_", "OMPI_", "PMI_", "MPI_", "SLURM_", "TORCHELASTIC_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RIGHT = "the sum is right"
_FACTS = "facts of torch: "

# One update on the device that a run would choose; then facts about torch.
_STEP = f"""
import importlib.util, json, torch
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.modules.devices import has_bf16
backend = LocalBackend()
model = torch.nn.Linear(8, 8)
backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
with backend.accumulate(sync=True):
    with backend.autocast():
        loss = backend.model(torch.ones(2, 8, device=backend.device)).square().sum()
    backend.backward(loss)
assert backend.clip_and_step().result()[1]
facts = {{"device": str(backend.device), "cuda": torch.version.cuda, "threads": torch.get_num_threads()}}
facts |= {{"cpu capability": torch.backends.cpu.get_cpu_capability(), "cpu bf16": has_bf16("cpu")}}
if backend.device.type == "cuda":
    facts["gpu bf16"] = torch.cuda.is_bf16_supported()
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print({_FACTS!r} + json.dumps(facts), flush=True)
print({_RIGHT!r}, flush=True)
"""

_SUM = f"""
import torch
from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.training import TrainerArgs
backend = get_backend(TrainerArgs())
vector = torch.arange(1000, dtype=torch.float32)
total = backend.sum(vector * (backend.rank + 1))
assert backend.world_size == 2 and torch.equal(total, 3 * vector), (backend.world_size, total)
print({_RIGHT!r}, flush=True)
backend.close()
"""

_DEEPSPEED_SUM = f"""
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile; gloo does the same
import deepspeed, torch
deepspeed.init_distributed("gloo")
vector = torch.arange(1000, dtype=torch.float32)
total = vector * (deepspeed.comm.get_rank() + 1)
deepspeed.comm.all_reduce(total)
assert deepspeed.comm.get_world_size() == 2 and torch.equal(total, 3 * vector), total
print({_RIGHT!r}, flush=True)
torch.distributed.destroy_process_group()
"""


@dataclass
class Trial:
    """A small job of two processes that tests a distributed backend, and its result.

    Attributes:
        packages: import names of required packages.
        state: "works", "fails", "absent" (a package is not installed) or "late" (time limit exceeded).
        facts: information about torch that the job printed.
    """

    name: str
    command: list[str]
    packages: tuple[str, ...] = ()
    workers: int = 2
    environment: tuple[tuple[str, str], ...] = ()
    state: str = "absent"
    says: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] | None = None


def trials(gpus: int) -> list[Trial]:
    """List the jobs by which `lmtools doctor` tests the backends; the first is a single process.

    Args:
        gpus: number of GPUs of this machine.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python"]
    python = [sys.executable, "-c"]
    on_cpu = (("CUDA_VISIBLE_DEVICES", ""), ("ACCELERATE_USE_CPU", "true"), ("OMP_NUM_THREADS", "1"))
    horovodrun = ["horovodrun", "--gloo", "-np", "2"]
    cpu_deepspeed = (*on_cpu[::2], ("DS_ACCELERATOR", "cpu"))
    jobs = [
        Trial("one process", [*python, _STEP], ("torch",), 1),
        Trial("accelerate, gloo", [*torchrun, *python, _SUM], ("torch", "accelerate"), 2, on_cpu),
        Trial("horovod, gloo", [*horovodrun, *python, _SUM], ("torch", "horovod"), 2, on_cpu[::2]),
        Trial("deepspeed, gloo", [*torchrun, *python, _DEEPSPEED_SUM], ("torch", "deepspeed"), 2, cpu_deepspeed),
    ]
    if gpus > 1:
        jobs.append(Trial("accelerate, nccl", [*torchrun, *python, _SUM], ("torch", "accelerate")))
        stage = (("ACCELERATE_USE_DEEPSPEED", "true"), ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"))
        jobs.append(Trial("deepspeed, nccl", [*torchrun, *python, _SUM], ("torch", "deepspeed"), 2, stage))
    return jobs


def run_trials(jobs: Sequence[Trial], limit: float) -> None:
    """Run test jobs at the same time, and store the result of each.

    Args:
        limit: seconds after which jobs that still run are killed.
    """
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: _run(job, limit), jobs))


def _run(job: Trial, limit: float) -> None:
    lacking = [name for name in job.packages if importlib.util.find_spec(name) is None]
    if lacking:
        job.says = f"{lacking[0]} is not installed"
        return
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(job)
            )
        except OSError as error:
            job.state, job.says = "fails", f"{job.command[0]}: {error.strerror}"
            return
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            job.state, job.says, job.seconds = "late", f"it had not ended after {limit:g} s", limit
            return
        finally:
            if process.poll() is None:
                _end(process)
        job.seconds = round(time.monotonic() - begin, 1)
        log.seek(0)
        output = log.read()
    if code == 0 and output.count(_RIGHT) == job.workers:
        job.state = "works"
    else:
        job.state, job.says = "fails", _reason(output, code)
    facts = [line.partition(_FACTS)[2] for line in output.splitlines() if _FACTS in line]
    job.facts = json.loads(facts[0]) if facts else None


def _reason(output: str, code: int) -> str:
    """The first error that a job printed."""
    errors = re.findall(r"^(?:\[\d\]<std\w+>:)?((?:[\w.]*\.)?\w*(?:Error|Exception|Exit): .+)", output, re.MULTILINE)
    lines = output.strip().splitlines()
    return (errors[0] if errors else lines[-1] if lines else f"exit code {code} without output")[:300]


def _environment(job: Trial) -> dict[str, str]:
    """This process's environment with the package importable, without a launcher's variables, and the job's own."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(_LAUNCHERS) and n not in _RANKS}
    root = str(Path(__file__).resolve().parents[2])
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [clean.get("PYTHONPATH"), root]))
    clean["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", "")])
    return {**clean, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **dict(job.environment)}


def _end(process: subprocess.Popen) -> None:
    """Kill a job with everything that it started."""
    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
