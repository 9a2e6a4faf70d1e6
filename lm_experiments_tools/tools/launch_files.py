"""Job files of schedulers: a batch script of Slurm, a TrainJob of Kubeflow Trainer, a program for Ray Train."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.launch_args import LaunchArgs


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script with its flags, and where it runs.

    Attributes:
        args: the flags of lmtools launch.
        words: script and flags.
        known_as: the script's name as a command of lmtools; None for another program.
        folder: where relative paths start, on every machine.
        python: the interpreter, on every machine.
        env: environment variables of the workers.
    """

    args: LaunchArgs
    words: tuple[str, ...]
    known_as: str | None
    name: str
    folder: str
    python: str
    env: Mapping[str, str]

    def launcher(self, nodes: object, workers: object, node: object, address: object, port: object) -> str:
        """torchrun or accelerate launch of one machine, as shell; the script follows."""
        if self.args.launcher != "accelerate":
            numbers = f"--nnodes {nodes} --nproc_per_node {workers} --node_rank {node}"
            where = f"--master_addr {address} --master_port {port}"
            return f"{_quoted(self.python)} -m torch.distributed.run {numbers} {where}"
        total = int(nodes) * int(workers)
        file = self.args.accelerate_config
        how = f"--config_file {_quoted(file)}" if file else "--multi_gpu"
        numbers = f"--num_machines {nodes} --num_processes {total} --machine_rank {node}"
        where = f"--main_process_ip {address} --main_process_port {port}"
        return f"{_quoted(self.python)} -m accelerate.commands.launch {how} {numbers} {where}"

    def exports(self) -> list[str]:
        """Lines of shell that set the environment."""
        return [f"export {name}={_quoted(value)}" for name, value in self.env.items()]

    def setup(self) -> list[str]:
        """Commands of shell that run the lines of --setup: a comment or a mistake in one ends with it."""
        return [f"eval {_quoted(line)}" for line in self.args.setup]


def _quoted(word: object) -> str:
    return shlex.quote(str(word))


# srun's tasks get SIGTERM with all that they started. A launcher that was told to end says 1 whatever happened, so the
# shell above it, which has heard the signal too, says what a worker says: 143, saved.
_TASK = 'trap told=143 TERM; {launcher} "$0" "$@"; code=$?; [ $code -eq 0 ] || exit ${{told:-$code}}'


def slurm_file(job: Job) -> str:
    """A script for sbatch: saves and is put into the queue again when it gets SIGTERM, as before its time limit."""
    args = job.args
    by_srun = args.launcher in (None, "srun")
    tasks, cpus = (args.per_node, args.cpus) if by_srun else (1, args.cpus * args.per_node)
    options = {"job-name": job.name, "nodes": args.nodes, "ntasks-per-node": tasks, "cpus-per-task": cpus}
    more = {"gpus-per-node": args.gpus, "time": args.time, "partition": args.partition}
    options |= {name: value for name, value in more.items() if value is not None}
    # only the tasks are told (B:TERM would tell this script alone)
    saves = {"signal": f"TERM@{args.grace}", "requeue": None, "open-mode": "append", "output": "%x.%j.txt"}
    lines = ["#!/bin/bash"]
    lines += [_directive(name, value) for name, value in (options | saves | {"chdir": job.folder}).items()]
    lines += [f"#SBATCH --{word}" for word in args.sbatch]
    lines += [*job.exports(), *(f"{line} || exit 2" for line in job.setup())]
    start = f"srun --kill-on-bad-exit=1 --cpus-per-task={cpus}"
    if by_srun:
        lines.append(f"{start} {shlex.join([job.python, *job.words])}")
    else:
        lines.append("first=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)")
        lines.append("export first port=$((15000 + SLURM_JOB_ID % 15000))")
        launcher = job.launcher(args.nodes, args.per_node, "$SLURM_NODEID", "$first", "$port")
        lines.append(f"{start} bash -c {_quoted(_TASK.format(launcher=launcher))} {shlex.join(job.words)}")
    lines += ["code=$?", "[ $code -eq 143 ] && scontrol requeue $SLURM_JOB_ID", "exit $code"]
    return "\n".join(lines) + "\n"


def _directive(name: str, value: object) -> str:
    if "\n" in str(value):  # what follows would be a line of shell
        raise UserError(f"{name} {value!r} has a line break, which an option in a file for sbatch cannot have.")
    return f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}"


def train_job(job: Job) -> str:
    """A TrainJob of Kubeflow Trainer, whose torch runtime tells torchrun its numbers by PET_... variables."""
    args = job.args
    if not re.fullmatch(
        r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name := job.name.lower().replace("_", "-").replace(".", "-")
    ):
        raise UserError(
            f"--name {job.name}: Kubernetes takes up to 63 letters and digits with - between, a letter first."
        )
    flags = job.words[1:]
    command = ["--no-python", "lmtools", job.known_as, *flags] if job.known_as else list(job.words)
    start = f'cd {_quoted(job.folder)} && exec "$0" "$@"'  # exec: torchrun gets the pod's SIGTERM
    resources: dict[str, Any] = {"requests": {"cpu": args.cpus * args.per_node}}
    if args.gpus:
        resources["limits"] = {"nvidia.com/gpu": args.gpus}
    trainer = {
        "image": args.image,
        "command": list(map(_in_a_pod, ["bash", "-c", start, "torchrun", *command])),
        "numNodes": args.nodes,
        "numProcPerNode": args.per_node,
        "resourcesPerNode": resources,
        "env": [{"name": name, "value": _in_a_pod(value)} for name, value in job.env.items()],
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": args.runtime}, "trainer": _without_none(trainer)}
    if args.volume:
        spec["runtimePatches"] = [{"manager": "lmtools.launch", "trainingRuntimeSpec": _mounted(args.volume)}]
    metadata = _without_none({"name": name, "namespace": args.namespace})
    whole = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}
    return yaml.safe_dump(whole, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def _in_a_pod(word: str) -> str:
    """A word as it is: Kubernetes would put variables for $(NAME), and $ for $$."""
    return word.replace("$", "$$")


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _mounted(volume: str) -> dict[str, Any]:
    """The patch of a runtime by which its trainer's container, `node`, finds a claim at a path."""
    claim, _, path = volume.partition(":")
    pod = {
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "shared", "mountPath": path}]}],
    }
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {"template": {"spec": {"replicatedJobs": jobs}}}


_RAY = '''\
"""Train {name} by Ray: python FILE on a machine of the cluster, or ray job submit -- python FILE."""

import os
import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

FOLDER = {folder}
SCRIPT, *FLAGS = {words}


def train():
    """Run the script as a worker of one job, whose rank and address Ray puts into the environment."""
    os.chdir(FOLDER)
    sys.path.insert(0, os.path.dirname(os.path.abspath(SCRIPT)))
    sys.argv = [SCRIPT, *FLAGS]
    try:
        runpy.run_path(SCRIPT, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{{SCRIPT}} ended with exit code {{end.code}}; why stands above") from None


try:
    ray.init(address="auto", runtime_env={{"env_vars": {env}}})
    scaling = ScalingConfig(
        num_workers={workers},
        use_gpu={gpu},
        resources_per_worker={resources},
        placement_strategy="{strategy}",
    )
    failures = FailureConfig(max_failures={restarts})
    TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(name="{name}", failure_config=failures)).fit()
except ConnectionError:
    sys.exit("error: no Ray cluster is found: set RAY_ADDRESS, or start one here with ray start --head")
except TrainingFailedError as error:
    reason = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
    sys.exit(f"error: the run failed: {{reason}}")
'''


def ray_program(job: Job) -> str:
    """A program that has Ray Train's TorchTrainer run the script on each worker."""
    args = job.args
    return _RAY.format(
        name=job.name,
        folder=_literal(job.folder),
        words=_literal(job.words),
        env=_literal(job.env),
        workers=args.nodes * args.per_node,
        gpu=bool(args.gpus),
        resources=_literal({"CPU": args.cpus} | ({"GPU": 1} if args.gpus else {})),
        strategy="SPREAD" if args.nodes > 1 else "PACK",
        restarts=args.restarts,
    )


def _literal(value: Any) -> str:
    """Strings, numbers, lists and dictionaries as Python reads them, and as its formatters write them."""
    return json.dumps(value, ensure_ascii=False)
