"""Checkpoints of a run: how long training stops for one, how fast it goes on beside it, and the memory of a resume.

    python benchmarks/checkpoints.py stop --layers 4 --width 2048
    python benchmarks/checkpoints.py resume --launcher "torchrun --nproc_per_node 2"
    python benchmarks/checkpoints.py resume --launcher "horovodrun --gloo -np 2 python"

`stop` trains a model of some hundred million parameters with AdamW, saves once with the writing in the foreground and
once in the background, and gives the time of the call that saves, of the steps beside the writing, and of other steps.
`resume` saves one checkpoint and continues from it in fresh processes, whose largest memory it gives: VmHWM, which
counts pages of mapped files, and the largest RssAnon, which does not, both less what the process had before.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.training.trainer import TrainingLoop

SCRIPT = Path(__file__).resolve()


class Wide(nn.Module):
    """Layers of `width` x `width`, so that weights outweigh everything else."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = input_ids.float()
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"loss": (hidden.mean(-1) - labels[:, 0]).square().mean()}


class Rows:
    """An endless loader of the same rows."""

    fingerprint = "rows"

    def __init__(self, rows: int, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batch = {
            "input_ids": torch.randint(0, 2, (rows, width), generator=generator),
            "labels": torch.ones(rows, 1, dtype=torch.long),
        }

    def seek(self, consumed_samples: int) -> None:
        pass

    def __iter__(self):
        while True:
            yield self.batch


class Clock:
    """Notes the time of each step, and if a checkpoint was still being written at its end."""

    every = 1

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float, bool]] = []  # (step, its seconds, of CPU, beside a writing)
        self.cpu = 0.0

    def on_step_end(self, loop, info) -> None:
        writing = loop.saver._writing is not None and not loop.saver._writing.done()
        now = time.thread_time()
        self.steps.append((info.step, info.seconds, now - self.cpu, writing))
        self.cpu = now


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def make_loop(folder: str, settings: argparse.Namespace, callbacks=(), **options) -> TrainingLoop:
    args = TrainerArgs(batch_size=settings.rows, log_interval=10**6, model_path=folder, **options)
    backend = get_backend(args)
    model = Wide(settings.layers, settings.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return TrainingLoop(args, backend, model, optimizer, Rows(settings.rows, settings.width), callbacks=callbacks)


def measure_stop(settings: argparse.Namespace) -> None:
    print(
        "| written | bytes | training stops, s | CPU, s | complete after | step beside it, s, CPU | others, s, CPU |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for _ in range(settings.rounds):
        for in_background in (False, True):
            with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
                print(stop_once(folder, settings, in_background), flush=True)


def stop_once(folder: str, settings: argparse.Namespace, in_background: bool) -> str:
    clock, first = Clock(), 4

    class Once:
        every = first

        def on_step_end(self, loop, info) -> None:
            if info.step == first:
                loop.save()

    loop = make_loop(folder, settings, [Once(), clock], iters=settings.steps, save_in_background=in_background)
    save, stops, work, whole = loop.saver.save, [], [], []

    def timed(*args, **kwargs) -> None:
        started, cpu = time.perf_counter(), time.thread_time()
        save(*args, **kwargs)
        stops.append(time.perf_counter() - started)
        work.append(time.thread_time() - cpu)
        if loop.saver._writing is None:
            whole.append(stops[-1])
        else:
            loop.saver._writing.add_done_callback(lambda _: whole.append(time.perf_counter() - started))

    loop.saver.save = timed
    loop.train()
    others = [(wall, cpu) for step, wall, cpu, writing in clock.steps if not writing and step not in (1, first)]
    beside = [(wall, cpu) for step, wall, cpu, writing in clock.steps if writing and step > first]
    size = human_bytes(folder_bytes((Path(folder) / "last").resolve()))
    name = "in the background" if in_background else "in the foreground"
    times = f"{stops[0]:.2f} | {work[0]:.2f} | {whole[0]:.1f} | {_medians(beside)} | {_medians(others)}"
    return f"| {name} | {size} | {times} |"


def _medians(steps: list[tuple[float, float]]) -> str:
    """Seconds of a step, of them CPU, and how many there were."""
    if not steps:
        return "-"
    wall, cpu = (statistics.median(values) for values in zip(*steps, strict=True))
    return f"{wall:.2f}, {cpu:.2f} ({len(steps)})"


def status() -> dict[str, int]:
    """MiB of this process, by the names of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon"))}
    return {name: int(value) // 1024 for name, value in values.items()}


class Peak(threading.Thread):
    """Watches RssAnon, of which the kernel keeps no largest value."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.largest = max(self.largest, status()["RssAnon"])


def worker(settings: argparse.Namespace) -> None:
    """One worker of a run that is begun, or continued and measured."""
    args = TrainerArgs(model_path=settings.folder, iters=settings.steps)
    get_backend(args)
    model = Wide(settings.layers, settings.width)  # what the process has before anything is loaded
    before, peak = status(), Peak()
    del model
    peak.start()
    started = time.perf_counter()
    loop = make_loop(settings.folder, settings, iters=settings.steps, keep_checkpoints=None)
    seconds = time.perf_counter() - started
    peak.ended.set()
    peak.join()
    now, rank = status(), loop.backend.rank
    found = {"rank": rank, "seconds": round(seconds, 1), "step": loop.state.step, "before": before["VmRSS"]}
    found |= {"VmHWM": now["VmHWM"] - before["VmRSS"], "RssAnon": peak.largest - before["RssAnon"]}
    if loop.state.step == 0:
        loop.train()
    else:
        print("FOUND " + json.dumps(found), flush=True)
    loop.backend.close()


def measure_resume(settings: argparse.Namespace) -> None:
    folder = tempfile.mkdtemp(dir=settings.folder)
    size = ["--layers", str(settings.layers), "--width", str(settings.width), "--rows", str(settings.rows)]
    command = [*shlex.split(settings.launcher), str(SCRIPT), "worker", "--folder", folder, *size, "--steps", "1"]
    try:
        for _ in range(2):
            ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        files = {f.name: human_bytes(f.stat().st_size) for f in (Path(folder) / "last").resolve().iterdir()}
        print({name: size for name, size in files.items() if name.endswith("safetensors")})
        lines = [line.split("FOUND ")[1] for line in (ended.stdout + ended.stderr).splitlines() if "FOUND " in line]
        print("\n".join(sorted(lines)))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stop", "resume", "worker"))
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--launcher", default=f"{sys.executable}")
    parser.add_argument("--folder", default=None)
    settings = parser.parse_args()
    {"stop": measure_stop, "resume": measure_resume, "worker": worker}[settings.what](settings)


if __name__ == "__main__":
    main()
