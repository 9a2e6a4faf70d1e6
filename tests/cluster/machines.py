"""Two machines on this one: namespaces of network, host name and mounts, joined by a cable, with a sshd in each.

They share all files but those of folders that `Machine.takes_alone` gives to one of them. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.launch import environment
from tests.helpers import ROOT

INTERFACE, SSH_PORT = "eth0", 2299
NAMES = {"lmta": "10.77.0.1", "lmtb": "10.77.0.2"}
SSHD = "/usr/sbin/sshd"
_NO_QUESTIONS = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


def lacking(*programs: str) -> str | None:
    """Why a test must be skipped: not root, a program that is not installed, or no right to make namespaces."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [program for program in programs if shutil.which(program, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    allowed = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces: {allowed.stderr.strip()}" if allowed.returncode else None


@dataclass
class Machine:
    """One of them: commands run in the namespaces of the process `holder`."""

    name: str
    address: str
    holder: subprocess.Popen
    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def inside(self, *words: object) -> list[str]:
        """A command line that runs `words` on this machine, in the repository's root."""
        enter = ["nsenter", "-t", str(self.holder.pid), "--net", "--uts", "--mount", f"--wdns={ROOT}"]
        return [*enter, "--", *map(str, words)]

    def run(self, *words: object) -> str:
        """Run a command to its end; its output."""
        return subprocess.run(self.inside(*words), check=True, capture_output=True, text=True).stdout

    def start(self, *words: object, **extra: str) -> subprocess.Popen:
        """Start a command, whose output goes to a file; keyword arguments are environment variables."""
        log = self.folder / f"{self.name}.{len(self.started)}.txt"
        names = {"GLOO_SOCKET_IFNAME": INTERFACE, "HOROVOD_GLOO_IFACE": INTERFACE, "HOME": str(self.folder)}
        names["PATH"] = f"{self.folder}:{environment()['PATH']}"  # where `_start_sshd` puts an ssh
        with log.open("w") as output:
            process = subprocess.Popen(
                self.inside(*words),
                env=environment(**names, **extra),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.log = log
        self.started.append(process)
        return process

    def takes_alone(self, folder: Path) -> None:
        """From here on `folder` is one of this machine alone, at first empty."""
        self.run("mount", "-t", "tmpfs", "tmpfs", folder)

    def cut(self) -> None:
        """Take the cable out."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def drop(self, other: Machine) -> None:
        """Let all that is sent to another machine vanish, with the cable in its place."""
        self.run("ip", "route", "add", "blackhole", f"{other.address}/32")

    def slow_down(self) -> None:
        """Send 2 kilobits a second."""
        self.run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", "2kbit", "burst", 2000, "limit", 10**6)

    def mend(self) -> None:
        """Undo `cut`, `drop` and `slow_down`."""
        self.run("ip", "link", "set", INTERFACE, "up")
        for words in (("route", "flush", "type", "blackhole"), ("qdisc", "del", "dev", INTERFACE, "root")):
            program = "tc" if words[0] == "qdisc" else "ip"
            subprocess.run(self.inside(program, *words), capture_output=True)

    def crash(self) -> None:
        """Lose power: the cable is dead and nothing runs any more. What starts the machine again is still there."""
        self.cut()
        self._kill_all(but=[self.holder, *self.holder.children])

    def end(self) -> None:
        """Kill whatever runs here, daemons and orphans too."""
        self._kill_all()
        for process in (*self.started, *self.holder.children, self.holder):
            process.kill()
            process.wait()

    def _kill_all(self, but: Iterable[subprocess.Popen] = ()) -> None:
        """Kill what has this machine's host name."""
        kept = {str(process.pid) for process in but}
        name = os.readlink(f"/proc/{self.holder.pid}/ns/uts")
        for process in {entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()} - kept:
            with suppress(OSError):  # it has ended
                if os.readlink(f"/proc/{process}/ns/uts") == name and name != os.readlink("/proc/self/ns/uts"):
                    os.kill(int(process), signal.SIGKILL)


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """The machines lmta and lmtb, which see one another under these names."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NAMES.items()))
    machines = []
    try:
        for name, address in NAMES.items():
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sleep", "infinity"],
                start_new_session=True,
            )
            holder.children = []
            machines.append(Machine(name, address, holder, folder))
            _wait_for_namespace(holder.pid)
            machines[-1].run("hostname", name)
            machines[-1].run("mount", "--bind", hosts, "/etc/hosts")
        first, second = (str(machine.holder.pid) for machine in machines)
        ends = ("netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        subprocess.run(["ip", "link", "add", INTERFACE, *ends], check=True)
        for machine in machines:
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                machine.run("ip", "link", "set", interface, "up")
            _start_sshd(machine)
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            machine.end()


def _wait_for_namespace(process: int) -> None:
    """Until `unshare` has left this process's namespaces."""
    deadline = time.monotonic() + 10
    while os.readlink(f"/proc/{process}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
        assert time.monotonic() < deadline, "unshare made no namespaces"
        time.sleep(0.01)


def _start_sshd(machine: Machine) -> None:
    """A sshd that takes one key, which is made here and forgotten with the folder."""
    key, host_key = machine.folder / "key", machine.folder / "host_key"
    for file in (key, host_key):
        if not file.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    machine.run("sh", "-c", "mkdir -p /run/sshd && mount -t tmpfs -o mode=755 tmpfs /run/sshd")
    ssh = machine.folder / "ssh"  # that writes no known_hosts of the user, and needs neither -i nor -p
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F /dev/null -p {SSH_PORT} -i {key} {_NO_QUESTIONS} "$@"\n')
    ssh.chmod(0o755)
    options = {
        "Port": SSH_PORT, "HostKey": host_key, "AuthorizedKeysFile": f"{key}.pub", "StrictModes": "no",
        "PermitRootLogin": "yes", "UsePAM": "no", "PidFile": machine.folder / f"{machine.name}.pid",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    log = (machine.folder / f"{machine.name}.sshd.txt").open("w")
    sshd = subprocess.Popen(machine.inside(SSHD, "-D", "-e", "-f", "/dev/null", *words), stdout=log, stderr=log)
    machine.holder.children.append(sshd)


def torchrun_on(machines: tuple[Machine, Machine], port: int, *words: object, **extra: str) -> list[subprocess.Popen]:
    """`torchrun --nnodes 2 words...`, started by hand on each machine as its page says."""
    first = machines[0]
    launcher = ["torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--master_addr", first.name, "--master_port", port]
    return [
        machine.start(*launcher, "--node_rank", rank, *words, **{"ACCELERATE_USE_CPU": "true", **extra})
        for rank, machine in enumerate(machines)
    ]


def ended(process: subprocess.Popen, seconds: float) -> tuple[int, str]:
    """Exit code and output of a command that ends within some seconds."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = None
    return code, process.log.read_text(errors="replace")
