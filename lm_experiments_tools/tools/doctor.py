"""Report what works on this machine: versions, backends tried by two workers each, devices, compilers, space.

    lmtools doctor
    lmtools doctor --json

The exit code is 0 if training can run here, at least in one process, else 1.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from lm_experiments_tools.config.flags import POSITIVE, check_groups
from lm_experiments_tools.files import dump_json
from lm_experiments_tools.tools.diagnosis import machine
from lm_experiments_tools.tools.diagnosis.trials import run_trials, trials

_BUILD = "lmtools build-horovod"


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Trials and output."""

    json: bool = False
    """Print everything as one JSON object."""
    timeout: Annotated[float, POSITIVE] = 60.0
    """Time limit of the trials of backends, which run at the same time, in seconds."""

    def __post_init__(self) -> None:
        check_groups(self, (DoctorArgs,))


def run(args: DoctorArgs) -> int:
    """Print the report; returns 0 if training can run here."""
    found = examine(args.timeout)
    print(dump_json(found) if args.json else "\n".join(report(found)))
    return 0 if found["can train"] else 1


def examine(timeout: float) -> dict[str, Any]:
    """The report as plain JSON types."""
    gpus = machine.gpus()
    jobs = trials(len(gpus))
    with ThreadPoolExecutor(1) as pool:  # at the same time as the trials
        building = pool.submit(machine.builds_cpp)
        run_trials(jobs, timeout)
        no_cpp = building.result()
    backends = {job.name: {"state": job.state, "says": job.says, "seconds": job.seconds} for job in jobs}
    lacking = machine.missing()
    return {
        "can train": jobs[0].state == "works" and "" not in lacking,
        "versions": machine.versions(),
        "backends": backends,
        "torch": jobs[0].facts,
        "cpu": machine.cpu(),
        "gpus": gpus,
        "compilers": {**machine.compilers(), "C++ for torch.compile": no_cpp or "works"},
        "space": machine.space(),
        "missing": {extra: {"packages": names, "install": remedy(extra)} for extra, names in lacking.items()},
    }


def remedy(extra: str) -> str:
    """The command that installs an extra; Horovod is built after that."""
    command = machine.remedy(extra)
    return f"{command} && {_BUILD}" if extra == "horovod" else command


def report(found: Mapping[str, Any]) -> list[str]:
    """The lines of a terminal."""
    versions = [f"{name} {version or '-'}" for name, version in found["versions"].items()]
    wrapped = textwrap.wrap(" | ".join(versions), 100, initial_indent="  ", subsequent_indent="  ")
    lines = ["versions", *wrapped, "", "backends (a sum over two processes each)"]
    for name, trial in found["backends"].items():
        took = f"  {trial['seconds']:.1f} s" if trial["state"] == "works" else f": {trial['says']}"
        lines.append(f"  {name:<18} {trial['state']}{took}")
    cpu, torch = found["cpu"], found["torch"] or {}
    bf16 = "bf16 units" if cpu["bf16"] else "no bf16 units"
    lines += ["", "devices", f"  cpu  {cpu['model']}, {cpu['cores']} cores, {cpu['usable']} threads for this process"]
    lines += [f"       {bf16}; {' '.join(cpu['units'])}"]
    lines += [
        f"  gpu  {gpu['name']}, {gpu['memory.free']} free of {gpu['memory.total']}, driver {gpu['driver_version']}"
        for gpu in found["gpus"]
    ] or ["  gpu  none (nvidia-smi)"]
    lines += [f"  torch takes {torch.get('device', '?')}; built for CUDA {torch.get('cuda') or 'none'}"]
    for title in ("compilers", "space"):
        lines += ["", title, *(f"  {name:<22} {text or '-'}" for name, text in found[title].items())]
    if found["missing"]:
        lines += ["", "to install"]
        for extra, lacking in found["missing"].items():
            lines.append(f"  {extra or 'needed':<12} {', '.join(lacking['packages'])}: {lacking['install']}")
    for name, trial in found["backends"].items():
        if trial["state"] != "works" and name.startswith("horovod"):
            lines.append(f"  {'horovod':<12} compiled against this torch by: {_BUILD}")
    return [*lines, "", f"training {'can' if found['can train'] else 'cannot'} run here"]
