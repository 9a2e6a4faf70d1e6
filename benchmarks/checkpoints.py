"""Memory of each worker at a save and at a resume, for FSDP2 and ZeRO on CPUs.

    python benchmarks/checkpoints.py --millions 10 40 160 --workers 2 4 --kinds fsdp zero1 zero2 zero3

A job trains a T5 for two steps with AdamW in fp32 and saves; another one resumes. Memory is RssAnon, read every 2 ms,
so pages of files that are mapped do not count. `--repo` measures another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve()
MIB = 2**20


class Peak:
    """Context that measures by how many MiB the process grows at most."""

    def __enter__(self) -> Peak:
        self.first = self.most = anonymous()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self.grown = (self.most - self.first) / MIB

    def _watch(self) -> None:
        while not self._ends.is_set():
            self.most = max(self.most, anonymous())
            time.sleep(0.002)


def anonymous() -> int:
    """RssAnon of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def work(millions: int, run: str, out: str) -> None:
    """One worker of a job: train and save, or resume if the run has a checkpoint."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.config.training import TrainerArgs
    from lm_experiments_tools.training.trainer import TrainingLoop

    torch.set_num_threads(1)
    width = {10: 256, 40: 512, 160: 1024}[millions]
    config = T5Config(
        vocab_size=4096, d_model=width, d_kv=64, d_ff=4 * width, num_heads=width // 64, decoder_start_token_id=0,
        num_layers=round(millions * 1e6 / width**2 / 28), dropout_rate=0.0,
    )  # fmt: skip
    resumes = (Path(run) / "checkpoints").is_dir()
    args = TrainerArgs(batch_size=1, iters=2, log_interval=2, model_path=run, save_interval=2)
    backend = get_backend(args)
    model = T5ForConditionalGeneration(config)
    sizes = [parameter.numel() for parameter in model.parameters()]
    rows = [{"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}] * 2
    with Peak() as start:
        loop = TrainingLoop(args, backend, model, torch.optim.AdamW(model.parameters()), rows)
    seconds, save = 0.0, None
    if not resumes:
        save, whole = Peak(), loop.save

        def saved(*given: object, **named: object) -> None:
            nonlocal seconds
            began = time.perf_counter()
            with save:
                whole(*given, **named)
                loop.saver.wait()
            seconds = time.perf_counter() - began

        loop.save = saved
        loop.train()
    grown = start.grown if save is None else save.grown
    result = {"grown": grown, "setup": start.grown, "seconds": seconds, "sizes": [sum(sizes), max(sizes)]}
    Path(out, f"{backend.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    backend.close()


def job(repo: Path, kind: str, workers: int, *arguments: object) -> list[dict]:
    """Results of all workers of one job."""
    shim = repo / "tests" / "distributed" / "cpu_shim.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(workers)]
    with tempfile.TemporaryDirectory() as out:
        command = [*launcher, shim, kind, HERE, "--work", *arguments, out]
        environment = {
            **os.environ,
            "PYTHONPATH": str(repo),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [json.loads(Path(out, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 40, 160], choices=(10, 40, 160))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", default=["fsdp", "zero1", "zero2", "zero3"])
    parser.add_argument("--repo", type=Path, default=HERE.parents[1])
    args = parser.parse_args()
    print("| model | workers | save: rank 0, MiB | others | allowed | seconds | resume: rank 0 | others | allowed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind in args.kinds:
        for millions in args.millions:
            for workers in args.workers:
                with tempfile.TemporaryDirectory() as folder:
                    saved = job(args.repo, kind, workers, millions, f"{folder}/run")
                    resumed = job(args.repo, kind, workers, millions, f"{folder}/run")
                number, largest = saved[0]["sizes"]
                allowed = (12 * number / workers + 4 * largest) / MIB + 256
                # What the wrappers take without a checkpoint is not the resume's.
                loads = [again["grown"] - first["setup"] for again, first in zip(resumed, saved, strict=True)]
                saves = [one["grown"] for one in saved]
                print(
                    f"| {kind}, {number / 1e6:.0f} M | {workers} | {saves[0]:.0f} | {max(saves[1:]):.0f} | "
                    f"{allowed:.0f} | {max(one['seconds'] for one in saved):.1f} | {loads[0]:.0f} | "
                    f"{max(loads[1:]):.0f} | {allowed:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), *sys.argv[3:])
    else:
        main()
