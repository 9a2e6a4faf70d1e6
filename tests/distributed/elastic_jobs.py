"""Start restarting_worker.py by launchers that let workers come and go, and read what it has noted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.distributed.launch import CPU, ROOT, environment, start

WORKER = ROOT / "tests" / "distributed" / "restarting_worker.py"


def event(step: int, kind: str, *ranks: int, **more: Any) -> dict[str, Any]:
    """One event of a plan, see restarting_worker.py."""
    return {"step": step, "kind": kind, "ranks": ranks or [0], **more}


def write_plan(folder: Path, plan: Sequence[dict[str, Any]]) -> None:
    (folder / "plan.json").write_text(json.dumps(list(plan)))


def undisturbed(folder: Path, steps: int, *flags: str) -> str:
    """Hash of weights, optimizer and metrics of a run to which nothing happens."""
    start("ddp", WORKER, steps, folder, *flags)
    return digest(folder)


def digest(folder: Path) -> str:
    return (folder / "digest").read_text()


def noted(folder: Path) -> list[dict[str, Any]]:
    """Rank 0's notes of the steps, those that were made a second time included."""
    return [line for line in _lines(folder) if line["rank"] == 0]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().split("\n")[:-1]]


class Agents:
    """Launchers of one torchrun job, `--nnodes 1:3` of a worker each, which come and go while it runs."""

    def __init__(self, folder: Path, steps: int, *flags: str, **extra: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.command = folder, [str(part) for part in (WORKER, steps, folder, *flags)]
        self.environment = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **CPU, **extra)
        self.running: list[subprocess.Popen] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.running:
            agent.terminate()
        for agent in self.running:
            agent.wait(60)

    def add(self) -> subprocess.Popen:
        options = {
            "nnodes": "1:3", "nproc_per_node": "1", "rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{self.port}",
            "max_restarts": "9", "rdzv_conf": "last_call_timeout=2", "local_addr": "127.0.0.1", "rdzv_id": "elastic",
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in options.items()]
        launcher = [sys.executable, "-m", "torch.distributed.run", *flags, *self.command]
        with (self.folder / f"agent{len(self.running)}.txt").open("w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            agent = subprocess.Popen(launcher, cwd=ROOT, env=self.environment, **streams)
        self.running.append(agent)
        return agent

    def output(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.folder.glob("agent*.txt")))

    def wait_for(self, size: int, seconds: float = 120) -> None:
        """Return when the newest step was made by so many workers."""
        end = time.monotonic() + seconds
        while not (self.folder / "steps.jsonl").exists() or noted(self.folder)[-1]["size"] != size:
            assert time.monotonic() < end, f"no step of {size} workers\n{self.output()}"
            time.sleep(0.2)
