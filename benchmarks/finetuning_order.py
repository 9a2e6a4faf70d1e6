"""Validation loss of a fine-tuning run against CPU time, with rows sorted by length (the default) and in random order.

    OMP_NUM_THREADS=1 python benchmarks/finetuning_order.py --seeds 1 2

A tiny T5 with random weights (benchmarks/finetuning_task.py) on SciTLDR. Time is process CPU time of one thread,
without that of validation, so that other jobs on the machine do not count. Steps of 8 rows, and of 4 times 4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ORDERS = {"sorted, the default": {}, "random, --bucket_rows 1": {"bucket_rows": 1}}
STEPS = {
    "8 rows": {"batch_size": 8, "iters": 160, "valid_interval": 40},
    "4 x 4 rows": {"batch_size": 4, "gradient_accumulation_steps": 4, "iters": 120, "valid_interval": 30},
}
TINY = {
    "base": "t5-small", "vocab_size": 2048, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2,
    "num_decoder_layers": 2,
}  # fmt: skip


def curve(folder: Path, seed: int, **flags: Any) -> list[tuple[int, float, float]]:
    """(step, CPU seconds of training, validation loss) at each validation of a run."""
    from benchmarks.finetuning_task import TLDR
    from lm_experiments_tools import FineTuner
    from lm_experiments_tools.training.trainer import TrainingLoop

    points: list[tuple[int, float, float]] = []
    spent, begin, validate = 0.0, time.process_time(), TrainingLoop.validate

    def timed(loop: TrainingLoop, *args: Any, **more: Any) -> dict[str, float]:
        nonlocal spent
        start = time.process_time()
        found = validate(loop, *args, **more)
        points.append((loop.state.step, start - begin - spent, found["loss"]))
        spent += time.process_time() - start
        return found

    tuner = FineTuner(
        folder / "model", data_path=TLDR, valid_data_path=TLDR.with_name("validation.json"), valid_samples=128,
        lr=3e-3, lr_scheduler="constant_with_warmup", num_warmup_steps=20, dropout_rate=0.0, metrics="none", seed=seed,
        log_interval=1000, **flags,
    )  # fmt: skip
    spent = time.process_time() - begin
    TrainingLoop.validate = timed
    try:
        tuner.train()
    finally:
        TrainingLoop.validate = validate
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    seeds = parser.parse_args().seeds
    sys.path.insert(0, str(ROOT))
    from benchmarks.finetuning_task import prepare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.json").write_text(json.dumps(TINY))
        options = argparse.Namespace(
            data_path=None, vocab=folder / "none", model_cfg=str(folder / "tiny.json"), input_seq_len=512,
            target_seq_len=128, batch_size=8,
        )  # fmt: skip
        # there is no such vocabulary, so one of 2,000 pieces is made of the sources
        prepare(options, folder, seed=1)
        print("| step | order | seed | CPU seconds: validation loss |\n|---|---|---|---|")
        for step, flags in STEPS.items():
            for seed in seeds:
                for order, more in ORDERS.items():
                    points = curve(folder, seed, **flags, **more)
                    cells = ", ".join(f"{seconds:.0f}: {loss:.3f}" for _, seconds, loss in points)
                    print(f"| {step} | {order} | {seed} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
