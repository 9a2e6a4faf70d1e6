"""Loss curves of `--data_pipeline seqio` and `native`, from the same weights, on the same text.

    python benchmarks/seqio_curve.py --corpus train-*.jsonl --vocab sentencepiece.model

The two read other examples (seqio shuffles and cuts the text in its own way), so their curves cannot be equal; they
should differ by no more than two seeds of one pipeline do. Three runs of each with seeds 1, 2, 3 start from one
checkpoint; the mean loss of each block of steps is printed, with the spread over seeds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1, 2, 3)


def train(folder: Path, name: str, *flags: str) -> list[float]:
    """Losses of the steps of one run."""
    command = [sys.executable, str(ROOT / "run_t5_pretraining.py"), "--model_path", str(folder / name)]
    command += ["--backend", "local", "--log_interval", "1", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    lines = map(json.loads, (folder / name / "metrics.jsonl").open())
    return [line["loss"] for line in lines if line.get("split", "train") == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help=".jsonl files with a field `text`")
    parser.add_argument("--vocab", type=Path, required=True, help="a sentencepiece model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--block", type=int, default=50, help="steps averaged in a row of the table")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of run_t5_pretraining.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        for path in arguments.corpus:
            (folder / "text" / path.name).symlink_to(path.resolve())
        common = ["--data_path", str(folder / "text"), "--vocab", str(arguments.vocab.resolve()), "--batch_size", "8"]
        preset = ROOT / "models_configs" / "t5_configs" / "t5-micro.json"
        (folder / "model.json").write_text(json.dumps({"base": str(preset), "vocab_size": 32128}))
        common += ["--model_cfg", str(folder / "model.json"), "--input_seq_len", "128"]
        common += ["--lr", "3e-3", "--clip_grad_norm", "1"]
        common += arguments.flags
        train(folder, "weights", *common, "--iters", "1", "--lr", "1e-12", "--data_pipeline", "native")
        start = ["--init_checkpoint", str(folder / "weights" / "last"), "--reset_optimizer", "--reset_iteration"]
        common += [*start, "--iters", str(arguments.steps)]
        curves = {
            (pipeline, seed): train(
                folder, f"{pipeline}{seed}", *common, "--data_pipeline", pipeline, "--seed", str(seed)
            )
            for seed in SEEDS
            for pipeline in ("native", "seqio")
        }
    report(curves, arguments.steps, arguments.block)


def report(curves: dict[tuple[str, int], list[float]], steps: int, block: int) -> None:
    """Print the table: for each block of steps, mean over seeds and its spread, and the difference in spreads."""
    print("| steps | native | seqio | difference | spread over seeds |\n|---|---|---|---|---|")
    for begin in range(0, steps, block):
        means = {run: mean(losses[begin : begin + block]) for run, losses in curves.items()}
        native, seqio = ([means[pipeline, seed] for seed in SEEDS] for pipeline in ("native", "seqio"))
        spread = ((stdev(native) ** 2 + stdev(seqio) ** 2) / 2) ** 0.5
        print(
            f"| {begin + 1} to {begin + block} | {mean(native):.3f} | {mean(seqio):.3f} | "
            f"{mean(seqio) - mean(native):+.3f} | {spread:.3f} |"
        )


if __name__ == "__main__":
    main()
