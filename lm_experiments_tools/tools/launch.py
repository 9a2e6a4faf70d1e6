"""Submit a script to a cluster as one job of several machines, once its flags are checked.

    lmtools launch --slurm --nodes 2 --gpus 8 --time 24:00:00 -- run_t5_pretraining.py --config run.yaml
    lmtools launch --hosts n1:8,n2:8 -- run_t5_pretraining.py --config run.yaml
    lmtools launch --ray --nodes 2 --gpus 8 -- run_t5_pretraining.py --config run.yaml
    lmtools launch --kubeflow --nodes 2 --gpus 8 --image IMAGE -- run_t5_pretraining.py --config run.yaml

After `--` stands the script, by its file or as lmtools calls it (pretrain-t5), and its flags; `--print` shows all of
what would be run or submitted. See docs/clusters.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.launch_args import LaunchArgs
from lm_experiments_tools.tools.launch_files import Job, ray_program, slurm_file, train_job
from lm_experiments_tools.tools.launch_hosts import host_commands, run_on_hosts

_FILES = {"run_t5_pretraining": "pretrain-t5", "run_bert_pretraining": "pretrain-bert", "run_finetuning": "finetune"}


def main(argv: Sequence[str]) -> int:
    """Check, and print, submit or run the job; returns its exit code, or that of the submission. Raises UserError."""
    if "--" in argv:
        own, words = list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])
    else:
        own, words = list(argv), []
    if not words and (script := next((word for word in own if word.endswith(".py")), None)):
        raise UserError(f"{script}: put -- before the script, as in lmtools launch --slurm -- {script} --lr 1e-3.")
    args, _ = parse(LaunchArgs, own, description=__doc__, program="lmtools launch")
    args.check_launcher()
    args.check_words()
    job = job_of(args, words)
    if args.slurm:
        return _submit(args, slurm_file(job), ["sbatch"], "on a login node of the cluster")
    if args.kubeflow:
        return _submit(args, train_job(job), ["kubectl", "create", "-f", "-"], "where kubectl knows the cluster")
    if args.ray:
        if not args.print:
            _run_ray(ray_program(job))
        print(ray_program(job), end="")
        return 0
    commands = host_commands(job, args.machines(), args.port)
    if args.print:
        print("\n".join(commands.values()))
        return 0
    _check_launcher_is_there(args)
    return run_on_hosts(commands)


def job_of(args: LaunchArgs, words: Sequence[str]) -> Job:
    """The job of a script and its flags, which its own parser has read. Raises UserError."""
    from lm_experiments_tools.tools.main import arguments_of, script_path

    if not words:
        raise UserError(
            "no script is given: it stands after --, as in lmtools launch --slurm -- pretrain-t5 --lr 1e-3."
        )
    script, *flags = words
    name = _FILES.get(Path(script).stem, script)
    cls = arguments_of(name)
    if not Path(script).is_file():
        if cls is None or script != name:
            raise UserError(f"{script} is no file here, nor one of {', '.join(_FILES.values())}.")
        script = str(script_path(name))
    elif not script.endswith(".py"):
        raise UserError(f"{script} is no Python script: after -- stands the script (a .py file), then its flags.")
    if cls is None:
        print(f"{script} is not one of our scripts: its flags are not checked", file=sys.stderr)
        settings = None
    else:
        settings, _ = parse(cls, flags, program=f"lmtools launch ... -- {words[0]}")
        _check_settings(args, settings)
    folder = getattr(settings, "model_path", None)
    proposed = re.sub(r"[^\w.-]+", "-", Path(folder).name if folder else Path(script).stem, flags=re.ASCII).strip(
        "-._"
    )
    return Job(
        args=args, words=(script, *flags), known_as=name if cls else None, name=args.name or proposed or "train",
        folder=os.getcwd(), python=sys.executable, env=_environment(args),
    )  # fmt: skip


def _environment(args: LaunchArgs) -> dict[str, str]:
    names = {"OMP_NUM_THREADS": str(args.cpus)}
    if args.interface:
        names |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), args.interface)
    if not (args.gpus or args.hosts):
        names["ACCELERATE_USE_CPU"] = "1"
    return names | dict(word.split("=", 1) for word in args.env)


def _check_settings(args: LaunchArgs, settings: Any) -> None:
    """Refuse what would be refused, or lost, once the job has waited in a queue."""
    count = sum(args.machines().values()) if args.hosts else args.nodes * args.per_node
    settings.check_shares(count)
    by_horovod = args.launcher == "horovodrun"
    if settings.backend == "local" and count > 1:
        raise UserError(f"--backend local has one worker, and the job {count}: leave it out.")
    if settings.backend == "horovod" and not by_horovod:
        raise UserError("--backend horovod is started by --launcher horovodrun, with --hosts: leave it out for DDP.")
    if settings.backend == "accelerate" and by_horovod:
        raise UserError("--backend accelerate is not started by --launcher horovodrun: leave one of them out.")
    if settings.model_path is None and (args.slurm or args.restarts):
        flag = "--slurm" if args.slurm else "--restarts"
        raise UserError(f"{flag} lets an interrupted run go on from its run directory: give the script --model_path.")


def _submit(args: LaunchArgs, text: str, command: Sequence[str], where: str) -> int:
    if args.print:
        print(text, end="")
        return 0
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not installed here: submit {where}, or take the file along: --print > FILE.")
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = " ".join((ended.stderr or ended.stdout).split()) or f"exit code {ended.returncode}"
        raise UserError(f"{command[0]} refused the job: {said}")
    print(ended.stdout.strip())
    return 0


def _run_ray(program: str) -> NoReturn:
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray needs Ray, which is not installed: pip install 'ray[train]'")
    os.execv(sys.executable, [sys.executable, "-c", program])  # in this one's place, so that signals reach it


def _check_launcher_is_there(args: LaunchArgs) -> None:
    if args.launcher == "horovodrun" and importlib.util.find_spec("horovod") is None:
        raise UserError("--launcher horovodrun needs Horovod, which is not installed: lmtools build-horovod")
    if args.launcher == "accelerate" and importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "--launcher accelerate needs Accelerate, which is not installed: pip install 'accelerate>=1.15'"
        )
    if shutil.which("ssh") is None:
        raise UserError("--hosts needs ssh, which is not installed here: apt-get install openssh-client")
