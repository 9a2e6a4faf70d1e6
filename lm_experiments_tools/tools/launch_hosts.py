"""A job on machines that ssh reaches: started on all of them, and ended on all when it fails on one."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TextIO

from lm_experiments_tools.tools.launch_files import Job

_POLL, _PATIENCE = 0.2, 60.0  # seconds; torchrun gives its workers 30 to save and end


def host_commands(job: Job, machines: Mapping[str, int], port: int) -> dict[str, str]:
    """{machine: command to be run here}; horovodrun starts all workers from the first one's."""
    names = list(machines)
    if job.args.launcher == "horovodrun":
        slots = ",".join(f"{name}:{count}" for name, count in machines.items())
        words = [str(Path(job.python).with_name("horovodrun")), "--gloo", "-np", sum(machines.values()), "-H", slots]
        words += ["--network-interfaces", job.args.interface] if job.args.interface else []
        return {names[0]: _watched(job, shlex.join(map(str, [*words, job.python])))}
    first = names[0].split("@")[-1]
    launchers = {
        name: job.launcher(len(names), count, rank, first, port) for rank, (name, count) in enumerate(machines.items())
    }
    return {name: shlex.join(["ssh", name, _watched(job, launcher)]) for name, launcher in launchers.items()}


def _watched(job: Job, launcher: str) -> str:
    """A line for any shell: the job in its folder, and SIGTERM for it at the end of input, as when ssh is gone."""
    before = [f"cd {shlex.quote(job.folder)}", *job.exports(), *job.setup(), "exec 3<&0"]
    script = (
        f"{' && '.join(before)} || exit 2; {launcher} {shlex.join(job.words)} </dev/null 3<&- & job=$!; "
        "(read -r _ <&3; kill $job) 2>/dev/null & watch=$!; wait $job; code=$?; kill $watch 2>/dev/null; exit $code"
    )
    return f"bash -c {shlex.quote(script)}"


def run_on_hosts(commands: Mapping[str, str]) -> int:
    """Run the commands until all have ended, each line of output after its machine's name.

    Returns:
        0 if all did; else the code of the first that did not, 143 after SIGTERM, 130 after Ctrl-C and 141 when the
        reader of the output has left (`| head`), by which the workers are told to save.
    """
    job = _Job(commands)
    previous = {number: signal.signal(number, job.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return job.until_done()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Job:
    """The connections of a job, which are processes of a session of their own: Ctrl-C comes here alone."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._told, self._why = 0, ""  # the last signal, and what is said of it
        self._over = False  # what comes now is of processes that outlive the job
        self._processes = {name: _start(command) for name, command in commands.items()}
        self._relays = [
            threading.Thread(target=self._relay, args=(name if len(commands) > 1 else "", process), daemon=True)
            for name, process in self._processes.items()
        ]
        for relay in self._relays:
            relay.start()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal."""
        self._why, self._told = signal.Signals(number).name, number

    def _relay(self, name: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            if self._over:
                return
            try:
                _print(f"[{name}] {line}" if name else line, sys.stdout)
            except OSError as error:  # reading goes on: a worker whose output waits could neither save nor end
                if not self._told:
                    self._why, self._told = f"the output cannot be written ({error.strerror})", signal.SIGPIPE

    def until_done(self) -> int:
        failed, deadline = None, None
        while running := [name for name, process in self._processes.items() if process.poll() is None]:
            ended = [(name, process.returncode) for name, process in self._processes.items() if process.returncode]
            failed = failed or next(iter(ended), None)
            if deadline is None and (failed or self._told):
                why = f"{failed[0]} ended with exit code {failed[1]}" if failed else self._why
                _say(f"{why}: ending the job on {', '.join(running)}")
                deadline = time.monotonic() + _PATIENCE
                for name in running:
                    self._processes[name].stdin.close()  # see _watched
            if deadline is not None and time.monotonic() > deadline:
                _say(f"no end on {', '.join(running)} within {_PATIENCE:.0f} s: look there for what is left")
                for name in running:
                    os.killpg(self._processes[name].pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(_POLL)
        for relay in self._relays:
            relay.join(timeout=5)
        self._over = True
        codes = [process.returncode for process in self._processes.values() if process.returncode]
        code = failed[1] if failed else next(iter(codes), 0)
        return 128 + self._told if self._told else code if code >= 0 else 128 - code


def _start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # there may be nobody left to tell
        _print(f"lmtools launch: {sentence}\n", sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print at once. Raises OSError the first time that it fails; what is printed later goes nowhere."""
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        # what is still buffered would fail once more when the interpreter closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise
