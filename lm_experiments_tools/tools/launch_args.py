"""The flags of `lmtools launch`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lm_experiments_tools.config.flags import COUNT, NOT_NEGATIVE, Unread, check_groups, needs
from lm_experiments_tools.errors import UserError

_WITH_HOSTS = Unread(lambda args: args.hosts is not None, "is not read with --hosts, which says it: a:8,b:8")
_NO_INTERFACE = Unread(lambda args: args.kubeflow, "is not read with --kubeflow: a pod has one network")
_NO_LAUNCHER = Unread(
    lambda args: not (args.slurm or args.hosts),
    "is for --slurm and --hosts: Ray and Kubeflow start workers themselves",
)
_HERE = Unread(lambda args: not (args.slurm or args.hosts), "is for --slurm and --hosts")
_NO_PORT = Unread(lambda args: args.hosts is None, "is for --hosts: elsewhere the port is chosen")
_WHERE = ("slurm", "ray", "kubeflow", "hosts")
# Options of sbatch by which the file counts workers and machines, or tells them to save -> the flag that gives them.
_OWN_OPTIONS = {
    "nodes": "--nodes",
    "ntasks": "--nodes and --workers",
    "ntasks-per-node": "--workers",
    "cpus-per-task": "--cpus",
    "gpus": "--gpus",
    "gpus-per-node": "--gpus",
    "gpus-per-task": "--gpus",
    "time": "--time",
    "signal": "--grace",
}


@dataclass(frozen=True, kw_only=True)
class WhereArgs:
    """Where: one of these four."""

    slurm: bool = False
    """Submit to Slurm: a file for sbatch, which is put into the queue again when it was interrupted and has saved."""
    ray: bool = False
    """Run on the Ray cluster of RAY_ADDRESS, or of this machine, by Ray Train's TorchTrainer."""
    kubeflow: bool = False
    """Submit to Kubernetes: a TrainJob of Kubeflow Trainer (2.2 or newer), by kubectl."""
    hosts: str | None = None
    """Machines and the workers of each, as a:8,b:8, reached by ssh without a password; from here, until the end."""
    print: bool = False
    """Print what would be run or submitted, and do nothing."""


@dataclass(frozen=True, kw_only=True)
class JobArgs:
    """The job."""

    nodes: Annotated[int, COUNT, _WITH_HOSTS] = 1
    """Machines."""
    gpus: Annotated[int | None, COUNT, _WITH_HOSTS] = None
    """GPUs of a machine, with a worker each."""
    workers: Annotated[int | None, COUNT, _WITH_HOSTS] = None
    """Workers of a machine, on CPUs. None: 1, or one a GPU."""
    cpus: Annotated[int, COUNT] = 1
    """CPUs of a worker, which are its threads too (OMP_NUM_THREADS)."""
    launcher: Annotated[Literal["srun", "torchrun", "accelerate", "horovodrun"] | None, _NO_LAUNCHER] = None
    """What starts the workers of a machine. None: srun with Slurm, else torchrun. horovodrun is for --hosts."""
    accelerate_config: str | None = None
    """File for accelerate launch, such as accelerate_configs/fsdp.yaml; with --launcher accelerate."""
    name: str | None = None
    """Name of the job. None: that of the run directory."""
    env: tuple[str, ...] = ()
    """NAME=VALUE ...: environment variables of the workers."""
    interface: Annotated[str | None, _NO_INTERFACE] = None
    """Network interface that machines see one another by, such as eth0, where they have several."""
    setup: Annotated[tuple[str, ...], _HERE] = ()
    """Lines of shell before the workers start, on each machine: "module load cuda"; one that fails ends the job."""


@dataclass(frozen=True, kw_only=True)
class SlurmArgs:
    """Slurm."""

    time: Annotated[str | None, needs("slurm")] = None
    """Time limit, as 24:00:00 or 2-00:00:00."""
    partition: Annotated[str | None, needs("slurm")] = None
    """Partition."""
    grace: Annotated[int, COUNT, needs("slurm")] = 300
    """Seconds before the time limit at which the workers are told to save and the job is put into the queue again."""
    sbatch: Annotated[tuple[str, ...], needs("slurm")] = ()
    """Further options of sbatch without dashes: account=lab mem=64G exclusive."""


@dataclass(frozen=True, kw_only=True)
class OtherArgs:
    """Ray, Kubeflow, hosts."""

    restarts: Annotated[int, NOT_NEGATIVE, needs("ray")] = 0
    """How often Ray starts the workers again after a failure; they go on from the newest checkpoint."""
    image: Annotated[str | None, needs("kubeflow")] = None
    """Container image with lm_experiments_tools in it. None: that of the runtime."""
    runtime: Annotated[str, needs("kubeflow")] = "torch-distributed"
    """ClusterTrainingRuntime, whose torchrun starts the workers."""
    namespace: Annotated[str | None, needs("kubeflow")] = None
    """Kubernetes namespace. None: that of kubectl."""
    volume: Annotated[str | None, needs("kubeflow")] = None
    """CLAIM:/path: a PersistentVolumeClaim and where the workers find it; data, settings and runs lie there."""
    port: Annotated[int, COUNT, _NO_PORT] = 29500
    """Port of the first machine, at which torchrun and accelerate meet."""


@dataclass(frozen=True, kw_only=True)
class LaunchArgs(OtherArgs, SlurmArgs, JobArgs, WhereArgs):
    """Launching."""

    def __post_init__(self) -> None:
        given = [f"--{name}" for name in _WHERE if getattr(self, name) not in (False, None)]
        if len(given) != 1:
            said = f"{' and '.join(given)} exclude each other" if given else "nothing says where the job runs"
            raise UserError(f"{said}: give one of --slurm, --ray, --kubeflow and --hosts a:8,b:8.")
        check_groups(self, (JobArgs, SlurmArgs, OtherArgs))

    @property
    def per_node(self) -> int:
        """Workers of a machine, where all have as many."""
        return self.gpus or self.workers or 1

    def machines(self) -> dict[str, int]:
        """{machine: its workers} of --hosts."""
        found: dict[str, int] = {}
        for word in (self.hosts or "").split(","):
            match = re.fullmatch(r"([A-Za-z0-9][\w.@-]*):([1-9]\d{0,3})", word.strip())
            if match is None or match[1] in found:
                raise UserError(
                    f"--hosts {self.hosts}: {word!r} is not NAME:WORKERS, each machine once, as in a:8,b:8."
                )
            found[match[1]] = int(match[2])
        return found

    def check_launcher(self) -> None:
        """Refuse launchers that cannot do it, and their settings without them."""
        if self.gpus and self.workers:
            raise UserError("--gpus and --workers exclude each other: a GPU has one worker, so --gpus says both.")
        if self.slurm and self.launcher == "horovodrun":
            raise UserError(
                "--launcher horovodrun goes by ssh, past Slurm, which could neither stop the workers nor tell them to "
                "save: take --hosts, or leave --launcher out; the same run may go on with DDP."
            )
        if self.hosts and self.launcher == "srun":
            raise UserError("--launcher srun is Slurm's: take --slurm, or torchrun, accelerate or horovodrun.")
        if self.hosts and self.launcher == "accelerate" and len(set(self.machines().values())) > 1:
            raise UserError(f"--launcher accelerate starts as many workers on each machine: --hosts {self.hosts}.")
        if self.accelerate_config is not None and self.launcher != "accelerate":
            raise UserError("--accelerate_config is read by accelerate launch alone: add --launcher accelerate.")
        if self.accelerate_config is not None and not Path(self.accelerate_config).is_file():
            raise UserError(f"--accelerate_config {self.accelerate_config} is not there.")

    def check_words(self) -> None:
        """Refuse what would break the file that is submitted."""
        for word in self.env:
            if not re.match(r"[A-Za-z_]\w*=", word):
                raise UserError(f"--env {word!r} is not NAME=VALUE.")
        for word in self.sbatch:
            if not re.fullmatch(r"[a-z][\w-]*(=[^\n]*)?", word):
                raise UserError(f"--sbatch {word!r} is no option of sbatch without its dashes, such as account=lab.")
            if flag := _OWN_OPTIONS.get(word.partition("=")[0]):
                raise UserError(f"--sbatch {word} would contradict the rest of the file: it is said by {flag}.")
        if self.name is not None and not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise UserError(f"--name {self.name!r} may have letters, digits, and - . _ between them.")
        if self.hosts is not None:
            self.machines()
        if self.port > 65535:
            raise UserError(f"--port is {self.port}: it must be at most 65535.")
        if self.volume is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/.*", self.volume):
            raise UserError(f"--volume {self.volume} is not CLAIM:/path, such as data:/data.")
        if self.time is not None and (limit := seconds_of(self.time)) <= self.grace:
            raise UserError(
                f"--time {self.time} is {limit} s, of which --grace {self.grace} leaves nothing to train in."
            )


def seconds_of(time: str) -> int:
    """Seconds of a time as sbatch reads it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]):
        raise UserError(f"--time {time} is no time of sbatch's: 24:00:00 or 2-00:00:00.")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
