"""Seconds a step of `make pretrain`, and the optimizer's share of them.

    make bench-demo        # data and initial values first, where there are none

The run is that of examples/pretrain_cpu.yaml without validation and checkpoints, on as many threads as
OMP_NUM_THREADS says, twice in turns: as this CPU is, and as one without bfloat16 and AVX-512 (ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2). Medians over the steps of all turns; the share is of CPU time. A share above LIMIT is an
error: bf16 on a CPU without it made the optimizer 80 % of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"this CPU": {}, "AVX2 alone": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}
LIMIT = 0.15  # largest share of the optimizer
WARM_UP = 5  # steps of a turn that are not counted


def train(steps: int, data: str) -> None:
    """Body of a worker: trains, and prints as JSON [seconds, CPU seconds, the optimizer's CPU seconds] of a step."""
    sys.path.insert(0, str(ROOT))
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    import run_t5_pretraining
    from lm_experiments_tools.modules.devices import has_bf16

    begun, ended = [], []
    register_optimizer_step_pre_hook(lambda *_: begun.append(time.process_time()))
    register_optimizer_step_post_hook(lambda *_: ended.append((time.perf_counter(), time.process_time())))
    changes = {
        "data_path": f"{data}/train", "vocab": f"{data}/vocab.model", "init_checkpoint": f"{data}/start",
        "iters": steps, "log_interval": steps,
        **dict.fromkeys(("model_path", "valid_data_path", "valid_interval", "valid_samples", "save_interval")),
    }  # fmt: skip
    flags = [part for name, value in changes.items() for part in (f"--{name}", str(value))]
    flags += ["--no_valid_at_start", "--no_save_best", "--no_report"]
    run_t5_pretraining.main(["--config", str(ROOT / "examples/pretrain_cpu.yaml"), *flags])
    pairs = zip(ended, ended[1:], begun[1:], strict=False)
    times = [(end[0] - last[0], end[1] - last[1], end[1] - start) for last, end, start in pairs]
    print(json.dumps({"bf16": has_bf16("cpu"), "times": times[WARM_UP:]}))


def turn(kind: str, options: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--worker", "--steps", str(options.steps), "--data", options.data]
    done = subprocess.run(command, env={**os.environ, **KINDS[kind]}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--data", default="data/default", help="folder that `make data` made")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return train(options.steps, options.data)
    found = {kind: [] for kind in KINDS}
    for _ in range(options.turns):
        for kind in KINDS:
            found[kind].append(turn(kind, options))
    print("| CPU | bf16 | s/step | CPU s/step | optimizer |\n|---|---|---|---|---|")
    shares = []
    for kind, turns in found.items():
        times = zip(*(step for each in turns for step in each["times"]), strict=True)
        wall, cpu, update = map(statistics.median, times)
        shares.append(update / cpu)
        print(f"| {kind} | {'yes' if turns[0]['bf16'] else 'no'} | {wall:.3f} | {cpu:.3f} | {shares[-1]:.1%} |")
    if max(shares) > LIMIT:
        sys.exit(f"the optimizer takes more than {LIMIT:.0%} of a step")


if __name__ == "__main__":
    main()
