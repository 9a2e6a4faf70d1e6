"""Train a tiny T5 for very many steps and see from outside that nothing grows: memory, descriptors, threads, logs.

    python -m tests.soak.program --steps 100000
    python -m tests.soak.program --steps 100000 --launcher torchrun

The run is the real script with all that goes on beside training: a text of which it reads several epochs, a log line
every 10 steps in metrics.jsonl and TensorBoard, 200 evaluations, 200 checkpoints written in the background of which
two are kept. The exit code is 1 if something grows, or if the run was too short or too unsteady to tell, and the run's
own if that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.launch import environment, horovodrun, missing, torchrun
from tests.helpers import ROOT
from tests.helpers.runs import TINY, words
from tests.helpers.vocabulary_toys import numbered_words_vocabulary
from tests.soak.growth import Bounds, judge
from tests.soak.watch import watch

LAUNCHERS = {"python": [sys.executable], "torchrun": torchrun(), "horovodrun": horovodrun()}
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # exit codes of a run that saved and ended
ROWS = 4  # of a worker in a step


def make_inputs(folder: Path, documents: int) -> None:
    """A vocabulary, the tiny model's configuration, and text of `documents` documents of one row or two."""
    folder.mkdir(parents=True)
    numbered_words_vocabulary(folder)
    (folder / "tiny.json").write_text(json.dumps(TINY | {"dropout_rate": 0.1}))
    for name, first, count in (("train", 0, documents), ("valid", documents, 20)):
        lines = [
            json.dumps({"text": " ".join(f"word{i % 500} number{(i + j) * 7 % 101}" for j in range(8 + i % 5))})
            for i in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def command(inputs: Path, run: Path, steps: int, launcher: str) -> list[str]:
    """The command line of the run."""
    often = max(steps // 200, 5)
    flags = words(
        data_path=inputs / "train.jsonl", valid_data_path=inputs / "valid.jsonl", vocab=inputs / "vocab.model",
        model_cfg=inputs / "tiny.json", model_path=run, input_seq_len=32, target_seq_len=8, batch_size=ROWS,
        data_n_workers=1, lr=1e-3, lr_scheduler="linear", num_warmup_steps=10, iters=steps,
        log_interval=10, valid_interval=often, save_interval=often, keep_checkpoints=2, save_best=True, seed=3,
        peak_tflops=1,
    )  # fmt: skip
    return [*LAUNCHERS[launcher], str(ROOT / "run_t5_pretraining.py"), *flags]


def soak(folder: Path, options: argparse.Namespace) -> int:
    """Run, watch, print the table; the exit code."""
    run, temporary = folder / "run", folder / "run" / "tmp"
    make_inputs(folder / "inputs", max(options.steps // 10, 50))
    temporary.mkdir(parents=True)  # what is left there is a file of the run's folder
    started = time.monotonic()
    with (folder / "output").open("wb") as output:
        line = command(folder / "inputs", run, options.steps, options.launcher)
        job = subprocess.Popen(line, env=environment(TMPDIR=str(temporary)), stdout=output, stderr=output)
        samples, stopped = [], False
        try:
            with (folder / "samples.jsonl").open("w") as file:
                for sample in watch(job.pid, run, interval=options.interval):
                    samples.append(sample)
                    print(json.dumps(sample), file=file, flush=True)
        except KeyboardInterrupt:
            stopped = True
        finally:
            job.terminate()  # nothing, where it has ended
            code = job.wait()
    if code and not (stopped or code in STOPPED):
        print(f"{(folder / 'output').read_text()[-3000:]}\nthe run failed with exit code {code}, see {folder}")
        return code if code > 0 else 1
    report, faults = judge(samples, Bounds(options.bound))
    if code:
        faults.append(f"FAULT: stopped before step {options.steps}")
    steps = samples[-1]["step"] if samples else 0
    print(f"{steps} steps by {options.launcher}, {len(samples)} samples, {time.monotonic() - started:.0f} s")
    print("\n".join([report, *faults]))
    return int(bool(faults))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="python", help="python: one process, others: two")
    parser.add_argument("--bound", type=float, default=100.0, help="KiB that memory may grow in 1,000 steps")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--folder", type=Path, help="a new one; kept, and the default too where something grows")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    if options.folder and folder.exists():
        parser.error(f"{folder} exists: name a new folder, or remove it")
    if options.launcher == "horovodrun" and (reason := missing("horovod")):
        parser.error(f"{reason}: make horovod")
    code = soak(folder, options)
    if not code and not options.folder:
        shutil.rmtree(folder)
    elif code:
        print(f"{folder} is kept")
    return code


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
