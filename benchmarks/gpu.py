"""Everything that only a GPU can show, the most valuable first: a lease of 15 minutes on one H200, H100 or A100.

    git -C NANOT5 archive --prefix=build/nanoT5/ HEAD | tar x        # before the lease: both travel with the tree
    git archive --prefix=build/before/ COMMIT | tar x
    flags="--nanot5 build/nanoT5 --before build/before"
    python benchmarks/gpu.py --output runs/tiny --device cpu --tiny $flags
    python benchmarks/gpu.py --output runs/gpu $flags                # again and again, until nothing is left
    python benchmarks/gpu.py --output runs/gpu --report              # the tables

A lease: clocks and versions; the Triton attention kernels one by one, now and of the tree --before; a step of
t5-v1_1-base at batch 128, now, before and with CUDA graphs, in turn, with its kernels by kind; cuDNN's attention with
a bias gradient, where nvidia-cudnn-frontend is installed; tiles of the kernel of dk and dv; the same step of nanoT5
and transformers, and BERT beside Trainer; tests of attention and AdamWScale; resume bits, and a trace of the script.
What follows after it is worth less.

A call ends before --budget_s and the next one continues. Each measurement is a JSON line in OUTPUT/results.jsonl,
written at once; compile caches are kept in OUTPUT/cache. Each case runs in a process of its own: one that crashes is a
row of its table, and the other measurements of its case are made by a new process. Cases that measure no time run next
to each other. No network is needed. Parts that need pytest or sentencepiece are skipped without them; a folder of
`pip install --target` on PYTHONPATH will do. On a CPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_report import report  # noqa: E402
from gpu_trace import last_line  # noqa: E402

if TYPE_CHECKING:
    from gpu_cases import Case

PARTS = "environment", "kernels", "step", "cudnn", "tiles", "pytest", "loop", "attention", "memory", "launchers"
MARGIN = 10  # seconds between the last case's end and the budget's
ATTEMPTS = 3  # processes that a case gets
_PR_SET_PDEATHSIG = 1
_TINY = {
    "base": str(ROOT / "models_configs/t5_configs/t5-v1_1-small.json"), "vocab_size": 1152, "d_model": 32, "d_kv": 8,
    "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
}  # fmt: skip


class Results:
    """The lines of OUTPUT/results.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = list(self._read()) if path.exists() else []

    def _read(self) -> Iterator[dict[str, Any]]:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut off when the machine was taken away
                continue

    def add(self, case: Case, row: dict[str, Any]) -> None:
        row = {"part": case.part, "case": case.name, "time": time.strftime("%F %T"), **row}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps(row), file=file, flush=True)
            os.fsync(file.fileno())

    def of(self, case: Case, status: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["case"] == case.name and row.get("status") == status]

    def is_finished(self, case: Case) -> bool:
        return bool(self.of(case, "done")) or len(self.of(case, "ended")) >= ATTEMPTS

    def failed_names(self, case: Case) -> list[str]:
        """Measurements that ended a process of this case, or of its part for tiles: not made again."""
        rows = [row for row in self.rows if row["part"] == case.part and row.get("error")]
        return [row["name"] for row in rows if case.part == "tiles" or row["case"] == case.name]


class Running:
    """A case's process."""

    def __init__(self, case: Case, options: argparse.Namespace, results: Results, deadline: float) -> None:
        self.case, self.results, self.last = case, results, case.name
        self.deadline = min(deadline, time.monotonic() + 60 + 4 * case.seconds)
        self.cut_short = self.deadline == deadline
        self.attempt = len(results.of(case, "started")) + 1
        name = "".join(c if c.isalnum() else "_" for c in case.name)[:80]
        self.log = options.output / "logs" / f"{name}_{self.attempt}.log"
        results.add(case, {"status": "started", "attempt": self.attempt})
        settings = {**case.settings, "skip": results.failed_names(case)}
        context = multiprocessing.get_context("spawn" if options.device == "cuda" else "fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_body, args=(case, settings, theirs, self.log))
        self.process.start()
        theirs.close()

    def read(self) -> bool:
        """Take a row; False where the process has ended."""
        try:
            row = self.pipe.recv()
        except EOFError:
            self._end()
            return False
        if "begin" in row:
            self.last = row["begin"]
        else:
            self.results.add(self.case, {**row, "attempt": self.attempt})
        return True

    def _end(self, error: str | None = None) -> None:
        self.process.join()
        if self.process.exitcode == 0:
            return self.results.add(self.case, {"status": "done", "attempt": self.attempt})
        if error is None:
            error = last_line(self.log.read_text(errors="replace")) + f" (exit code {self.process.exitcode})"
        self.results.add(self.case, {"name": self.last, "error": error, "attempt": self.attempt})
        status = "ended" if self.last != self.case.name else "done"  # without measurements of its own it is over
        self.results.add(self.case, {"status": status, "attempt": self.attempt})

    def stop(self) -> None:
        """Kill it with its children, at its own limit or at that of this call."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        if self.cut_short and self.attempt < ATTEMPTS:
            return self.results.add(self.case, {"status": "interrupted", "attempt": self.attempt})
        self._end("took too long")


def _body(case: Case, settings: dict[str, Any], pipe: connection.Connection, log: Path) -> None:
    """Run a case in its process: a group of its own, which ends with its parent."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        case.run(settings, pipe.send)
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        pipe.close()
        os._exit(code)  # a broken CUDA context may hang in the interpreter's own end


def run(cases: list[Case], options: argparse.Namespace, results: Results) -> list[Case]:
    """Run cases until none is left or time is up; returns those that are left."""
    end = time.monotonic() + options.budget_s - MARGIN
    while left := [case for case in cases if not results.is_finished(case)]:
        room = end - time.monotonic()
        fitting = [case for case in left if min(case.seconds, 0.9 * options.budget_s - MARGIN) <= room]
        if not fitting:
            break
        # Neighbours alone: a wave takes as long as its longest case, and those of a lease are not to wait for others.
        beside = itertools.takewhile(lambda case: not case.alone, fitting)
        wave = list(itertools.islice(beside, options.jobs)) or fitting[:1]
        print(f"{room:4.0f} s left, {len(left)} cases: {', '.join(case.name for case in wave)}", flush=True)
        _run_wave([Running(case, options, results, end) for case in wave])
    return left


def _run_wave(running: list[Running]) -> None:
    while running:
        wait = max(0.0, min(one.deadline for one in running) - time.monotonic())
        ready = connection.wait([one.pipe for one in running], wait)
        running = [one for one in running if one.pipe not in ready or one.read()]
        for one in [one for one in running if one.deadline <= time.monotonic()]:
            one.stop()
            running.remove(one)


def set_up(options: argparse.Namespace) -> dict[str, Any]:
    """Folders, caches and the settings that all cases share."""
    for name in ("logs", "cache"):
        (options.output / name).mkdir(parents=True, exist_ok=True)
    for variable, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ[variable] = str(options.output / "cache" / folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    tiny = options.output / "tiny_t5.json"
    tiny.write_text(json.dumps(_TINY))
    common = {"device": options.device, "output": str(options.output), "tiny_t5": str(tiny)}
    return common | {name: path and str(path.resolve()) for name, path in checkouts_of(options).items()}


def checkouts_of(options: argparse.Namespace) -> dict[str, Path | None]:
    return {"nanot5": options.nanot5, "before": options.before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="results, logs and caches")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, joined by commas")
    parser.add_argument("--only", default="", help="regular expression that names of cases must contain")
    parser.add_argument("--budget_s", type=float, default=540, help="seconds after which this call ends")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU computes in seconds")
    parser.add_argument("--nanot5", type=Path, help="a checkout of github.com/PiotrNawrot/nanoT5")
    parser.add_argument("--before", type=Path, help="a checkout of this project to compare the step and kernels with")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="cases at the same time")
    parser.add_argument("--report", action="store_true", help="write the tables: OUTPUT/gpu.md")
    options = parser.parse_args()
    parts, options.output = options.parts.split(","), options.output.resolve()
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    if options.report:
        return report(Results(options.output / "results.jsonl").rows, options.output / "gpu.md")
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported: by what follows
    from gpu_cases import all_cases
    from step_loops import NANOT5_MODEL

    # Noticed here, not in the middle of a lease by the worker that needs it.
    for (flag, folder), file in zip(checkouts_of(options).items(), (NANOT5_MODEL, "benchmarks/gpu.py"), strict=True):
        if folder and not (folder / file).is_file():
            parser.error(f"--{flag} {folder} is no checkout: it has no {file}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --tiny tries the benchmark itself")
    common = set_up(options)
    every = all_cases(common, options.tiny, options.jobs)
    cases = [case for case in every if case.part in parts and re.search(options.only, case.name)]
    left = run(cases, options, Results(options.output / "results.jsonl"))
    print(f"{len(left)} cases are left: run the same command again" if left else "nothing is left: --report")


if __name__ == "__main__":
    main()
