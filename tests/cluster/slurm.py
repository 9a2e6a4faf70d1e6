"""Slurm on two machines of `machines.py`, its controller on the first: processes that end with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.machines import INTERFACE, Machine
from tests.distributed.launch import environment

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
_CONF = """
ClusterName=tests
SlurmctldHost={names[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
MaxNodeCount=4
KillWait=30
JobRequeue=1
NodeName={names[0]},{names[1]} CPUs=2 RealMemory=4000
PartitionName=p Nodes={names[0]},{names[1]} Default=YES OverSubscribe=FORCE MaxTime=INFINITE State=UP
"""


class Slurm:
    """Commands of Slurm, given on the first machine."""

    def __init__(self, first: Machine, conf: Path) -> None:
        self.first, self.conf = first, conf

    def environment(self, **extra: str) -> dict[str, str]:
        """Of a command: as users have it outside any job."""
        return environment(SLURM_CONF=str(self.conf), GLOO_SOCKET_IFNAME=INTERFACE, **extra)

    def run(self, *words: object, timeout: float = 180, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its output holds stderr too."""
        return subprocess.run(
            self.first.inside(*words),
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )


@contextmanager
def slurm(machines: tuple[Machine, Machine], folder: Path) -> Iterator[Slurm]:
    """A cluster that is ready for jobs."""
    (folder / "state").mkdir(parents=True)
    cluster = Slurm(machines[0], folder / "slurm.conf")
    cluster.conf.write_text(_CONF.format(names=[machine.name for machine in machines], folder=folder))
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    daemons = [(machines[0], "slurmctld"), (machines[0], "slurmd"), (machines[1], "slurmd")]
    for machine, name in daemons:
        log = (folder / f"{name}.{machine.name}.txt").open("w")
        command = machine.inside(shutil.which(name, path=path), "-D", "-f", cluster.conf)
        daemon = subprocess.Popen(command, env=cluster.environment(), stdout=log, stderr=log)
        machine.holder.children.append(daemon)
    deadline = time.monotonic() + 30
    while (idle := cluster.run("sinfo", "-h", "-o", "%T %D").stdout.split()) != ["idle", "2"]:
        assert time.monotonic() < deadline, f"{idle} {(folder / 'slurmctld.log').read_text()[-2000:]}"
        time.sleep(0.3)
    yield cluster
    cluster.run("scancel", "--signal=KILL", "--user=root")
