"""Loss of five recipes after equal numbers of tokens, each at its best learning rate. Writes time_to_loss.md.

    OMP_NUM_THREADS=1 PRETRAINING_DATA=FOLDER python benchmarks/time_to_loss.py --folder runs/time_to_loss

FOLDER has corpus/train-*.jsonl and corpus/validation.jsonl. Every run is run_t5_pretraining.py on one model, batch,
order of data and number of steps, with other flags for optimizer and schedule. A recipe's rates are searched with one
seed: three rates, then a rate beyond the best one while that is at the edge, five at most. The best rate is then
trained with two seeds more. Losses of runs that ended are kept in --folder, where the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CORPUS = Path(os.environ.get("PRETRAINING_DATA", ROOT.parent / "shared" / "data")) / "corpus"
SEEDS = (1, 2, 3)
MAX_RATES = 5
VOCABULARY, BATCH, INPUTS, TARGETS = 2048, 16, 128, 29
MODEL = {"base": str(ROOT / "models_configs" / "t5_configs" / "t5-v1_1-small.json"), "vocab_size": VOCABULARY}
MODEL |= {"d_model": 128, "d_kv": 32, "d_ff": 320, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}


@dataclass(frozen=True)
class Recipe:
    """An optimizer with its schedule; of --lr a share, `lr_of_peak` times the peak rate of the schedule."""

    name: str
    rates: tuple[float, ...]
    """Three to search from, or the one that belongs to the recipe."""
    flags: Callable[[int], str]
    """The flags of a run of so many steps."""
    lr_of_peak: Callable[[int], float] = lambda steps: 1.0


def _cosine(optimizer: str) -> Callable[[int], str]:
    return lambda steps: f"--optimizer {optimizer} --lr_scheduler cosine --num_warmup_steps {steps // 10}"


RECIPES = (
    Recipe("AdamWScale, cosine", (1e-2, 2e-2, 4e-2), _cosine("AdamWScale")),
    Recipe("AdamW, cosine", (2e-3, 4e-3, 8e-3), _cosine("AdamW")),
    Recipe("Muon + AdamWScale, cosine", (1e-2, 2e-2, 4e-2), _cosine("Muon")),
    Recipe(
        "Adafactor, inverse square root",
        (1e-2, 2e-2, 4e-2),
        lambda steps: (
            f"--optimizer Adafactor --scale_parameter --lr_scheduler t5_inverse_sqrt --num_warmup_steps {steps // 10}"
        ),
        lambda steps: (steps // 10) ** 0.5,  # flat at lr / sqrt(warm-up), then falling
    ),
    Recipe(
        "nanoT5's: AdamWScale, cosine from half the rate, its own rate",
        (2e-2,),
        lambda steps: (
            "--optimizer AdamWScale --lr_scheduler cosine_with_floor --lr_min_ratio 5e-4 "
            f"--num_warmup_steps {steps * 10_000 // 65_536}"
        ),
    ),
)


@dataclass(frozen=True)
class Run:
    """One run that ended: losses on validation data by step, CPU seconds of all of it."""

    recipe: str
    rate: float
    seed: int
    losses: dict[str, float]
    cpu_seconds: float

    @property
    def last(self) -> float:
        return list(self.losses.values())[-1]


def steps_to(loss: float, losses: dict[str, float]) -> float | None:
    """Steps after which a curve first reaches this loss, by straight lines between validations; None: never."""
    points = [(int(step), value) for step, value in losses.items()]
    for (begin, above), (end, below) in zip(points, points[1:], strict=False):
        if below <= loss < above:
            return begin + (end - begin) * (above - loss) / (above - below)
    return None


def searched(first: Sequence[float], loss_of: Callable[[float], float]) -> dict[float, float]:
    """Losses by rate: of the first three, and of others by the same factor while the best is at the edge."""
    losses = {rate: loss_of(rate) for rate in first}
    while 1 < len(losses) < MAX_RATES:
        rates, best = sorted(losses), min(losses, key=losses.get)
        if best not in (rates[0], rates[-1]):
            break
        factor = rates[1] / rates[0]
        rate = best / factor if best == rates[0] else best * factor
        losses[rate] = loss_of(rate)
    return losses


class Search:
    """Runs in one folder, those that ended already read from its runs.jsonl."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.kept = folder, steps, folder / "runs.jsonl"
        lines = self.kept.read_text().splitlines() if self.kept.is_file() else []
        ended = [Run(**json.loads(line)) for line in lines]
        self.runs = {(run.recipe, run.rate, run.seed): run for run in ended if list(run.losses)[-1] == str(steps)}

    def prepare(self) -> None:
        """The vocabulary, token files and the model's configuration."""
        from lm_experiments_tools.tools.main import main as lmtools

        train, valid = sorted(map(str, CORPUS.glob("train-*.jsonl"))), str(CORPUS / "validation.jsonl")
        self.folder.mkdir(parents=True, exist_ok=True)
        vocabulary = str(self.folder / "vocab.model")
        if not (self.folder / "valid.idx").is_file():
            sample = ["--size", str(VOCABULARY), "--sample_megabytes", "2"]
            lmtools(["vocab", "--input", *train, *sample, "--output", vocabulary])
            for name, files in (("train", train), ("valid", [valid])):
                output = str(self.folder / name)
                lmtools(["tokenize", "--input", *files, "--vocab", vocabulary, "--output", output])
        (self.folder / "model.json").write_text(json.dumps(MODEL))

    def run(self, recipe: Recipe, rate: float, seed: int) -> Run:
        """One run of the script, or what is known of it."""
        if (recipe.name, rate, seed) in self.runs:
            return self.runs[recipe.name, rate, seed]
        from run_t5_pretraining import main as pretrain

        place = self.folder / f"{RECIPES.index(recipe)}-{rate:.0e}-{seed}"
        shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
        begin = time.process_time()
        pretrain([*self._flags(recipe, rate, seed), "--model_path", str(place)])
        lines = map(json.loads, (place / "metrics.jsonl").open())
        losses = {str(line["step"]): line["loss"] for line in lines if line["split"] == "valid" and "loss" in line}
        run = Run(recipe.name, rate, seed, losses, time.process_time() - begin)
        with self.kept.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        self.runs[recipe.name, rate, seed] = run
        print(f"== {recipe.name}, rate {rate:g}, seed {seed}: {run.last:.4f}", file=sys.stderr, flush=True)
        return run

    def _flags(self, recipe: Recipe, rate: float, seed: int) -> list[str]:
        files = {"data_path": "train", "valid_data_path": "valid", "vocab": "vocab.model", "model_cfg": "model.json"}
        sizes = {"input_seq_len": INPUTS, "target_seq_len": TARGETS, "batch_size": BATCH, "eval_batch_size": 32}
        sizes |= {"iters": self.steps, "valid_interval": max(1, self.steps // 5), "valid_samples": 256}
        options = {key: str(self.folder / name) for key, name in files.items()} | sizes
        options |= {"seed": seed, "lr": rate * recipe.lr_of_peak(self.steps), "clip_grad_norm": 1, "log_interval": 50}
        options |= {"model_cls": "modeling_t5:T5ForConditionalGeneration", "backend": "local"}
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        return [*flags, "--bf16", *recipe.flags(self.steps).split()]


def mean_curve(runs: list[Run]) -> dict[str, float]:
    """The mean over runs of the losses of each step."""
    return {step: statistics.mean(run.losses[step] for run in runs) for step in runs[0].losses}


def row(recipe: Recipe, rates: dict[float, float], runs: list[Run], goal: float) -> str:
    """One line of the table."""
    ends, steps = [run.last for run in runs], steps_to(goal, mean_curve(runs))
    others = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(rates.items()))
    spread = f"{statistics.mean(ends):.3f} | {min(ends):.3f} to {max(ends):.3f} ({statistics.stdev(ends):.3f})"
    cpu = statistics.median(run.cpu_seconds for run in runs)
    reached = "never" if steps is None else f"{steps:.0f}"
    return f"| {recipe.name} | {runs[0].rate:g} | {spread} | {reached} | {cpu:.0f} | {others} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "time_to_loss")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    if not (CORPUS / "validation.jsonl").is_file():
        print(f"Skipped: there is no {CORPUS / 'validation.jsonl'}; PRETRAINING_DATA names the folder above corpus/.")
        return

    sys.path.insert(0, str(ROOT))
    torch.set_flush_denormal(True)
    search = Search(args.folder.resolve(), args.steps)
    search.prepare()
    tried = {r: searched(r.rates, lambda rate, r=r: search.run(r, rate, SEEDS[0]).last) for r in RECIPES}
    best = {recipe: min(losses, key=losses.get) for recipe, losses in tried.items()}
    ended = {recipe: [search.run(recipe, rate, seed) for seed in SEEDS] for recipe, rate in best.items()}
    goal = list(mean_curve(ended[RECIPES[1]]).values())[-1]
    rows = [row(recipe, tried[recipe], runs, goal) for recipe, runs in ended.items()]
    tokens = args.steps * BATCH * INPUTS
    text = (
        "# Time to loss\n\n"
        f"`OMP_NUM_THREADS=1 PRETRAINING_DATA=FOLDER python benchmarks/time_to_loss.py --steps {args.steps}`\n\n"
        f"Span corruption on the corpus of FOLDER: a T5 v1.1 of 128 dimensions and 3 + 3 layers, {VOCABULARY:,} ids, "
        f"{args.steps} steps of {BATCH} x {INPUTS} ({tokens:,} input tokens, none read twice), bf16, no dropout, no "
        f"weight decay, gradients clipped at 1; torch {torch.__version__}.\n\n"
        "Loss is that on 256 rows of held-out text after the last step, over seeds "
        f"{', '.join(map(str, SEEDS))} at the best rate; the search is with seed {SEEDS[0]} alone. Rates are peaks of "
        f"the schedule. The last columns: steps until the mean of the seeds is at AdamW's last loss, {goal:.3f}; CPU "
        "seconds of a run with its validations; rates and losses of the search.\n\n"
        "| recipe | best rate | loss | over seeds (sd) | steps to AdamW's | CPU s | search |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    args.output.write_text(text + "\n".join(rows) + "\n")
    print(args.output.read_text())


if __name__ == "__main__":
    main()
