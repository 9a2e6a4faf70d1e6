"""Train a small T5 for a fixed time and measure bits per byte of held-out text: ours, HF Trainer, nanoT5.

    make speedrun
    python benchmarks/speedrun.py --seconds 300 --systems ours trainer+bf16 nanot5+compile --lr ours=2e-2,4e-2

All systems read the same examples in the same order (span corruption by our loader, whose time counts), train one
architecture (t5-micro, gated and untied as T5 v1.1) from random weights at one batch size, and are measured by one
evaluation, ours. `+bf16` and `+compile` turn on a system's own option; ours without them is `--speed auto`. Each
training has a process of its own. A system's steps are those that fit the time, by the median of its short trainings
made in turns with the others', so that its schedule ends with it. Learning rates are searched with the first seed,
above the largest as long as doubling helps; the other seeds run the best one. Finished trainings of a commit are kept
in `--work`.

nanoT5 needs a checkout of github.com/PiotrNawrot/nanoT5, named by --nanot5.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.models.build import load_model_config
from lm_experiments_tools.models.from_args import model_from_args, model_source, optimizer_from_args
from lm_experiments_tools.models.speed import choose_speed
from lm_experiments_tools.recipes import t5_data
from lm_experiments_tools.recipes.t5_sources import T5Sources
from lm_experiments_tools.training.losses import MODEL_LOSS, with_bytes
from lm_experiments_tools.training.trainer import TrainingLoop

RATES = {"ours": [1e-2, 2e-2, 4e-2], "trainer": [5e-5, 1e-3, 4e-3], "nanot5": [1e-2, 2e-2, 4e-2]}
DATA = Path("../shared/data/corpus")
MODEL = {"base": "t5-micro", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # nanoT5 needs both
SPLITS = ("train", "valid")  # names of files begin so
COLUMNS = ("system", "rate", "bits per byte", "spread", "steps", "input tokens", "s")
WARM_UP = 3  # steps before those whose time counts


@dataclass(frozen=True)
class Job:
    """One training: `steps` optimizer steps of a system with some of its options."""

    system: str
    options: argparse.Namespace
    data: Path
    seed: int
    lr: float
    steps: int
    ticks: list[float] = field(default_factory=list)  # times at which batches were ready

    @property
    def modes(self) -> dict[str, bool]:
        return dict.fromkeys(self.system.split("+")[1:], True)

    def batches(self, stream: Any) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of an endless stream."""
        for (batch, _), _ in zip(stream, range(self.steps), strict=False):
            self.ticks.append(now(self.options.clock))
            yield batch

    def args(self, **flags: Any) -> T5PretrainingArgs:
        """Flags of run_t5_pretraining.py that all systems share, for data and evaluation."""
        shared = {
            "model_cls": "modeling_t5:T5ForConditionalGeneration",
            "model_cfg": f"{self.data}/model.json",
            "dropout_rate": 0.0,
        }
        shared |= {"input_seq_len": 64, "target_seq_len": 36, "noise_density": 0.3, "batch_size": self.options.batch}
        shared |= {"data_path": (f"{self.data}/train",), "valid_data_path": f"{self.data}/valid"}
        shared |= {"seed": self.seed, "lr": self.lr, "iters": max(self.steps, 2), "log_interval": 10**6}
        shared |= {
            "valid_samples": self.options.valid_samples,
            "vocab": f"{self.data}/vocab.model",
            "backend": "local",
        }
        return T5PretrainingArgs(**shared, **flags)


def opened(args: T5PretrainingArgs, weights: dict[str, torch.Tensor] | None = None) -> tuple[TrainingLoop, Any]:
    """Our loop as run_t5_pretraining.py makes it, optionally with weights, and its data."""
    backend = get_backend(args)
    source = model_source(args, backend)
    data = t5_data.pretraining_data(args, backend, T5Sources(args), source.kind)
    model = model_from_args(args, source, data.vocabulary.size)
    if weights is not None:
        model.load_state_dict(weights, strict=False)  # tied embeddings have one name in some
    loss = with_bytes(MODEL_LOSS, data.vocabulary.token_bytes, model)
    optimizer = optimizer_from_args(args, model)
    return TrainingLoop(args, backend, model, optimizer, data.train, data.valid, loss=loss), data


def ours(job: Job) -> dict[str, torch.Tensor]:
    """Our trainer, with the recipe of examples/pretrain_cpu.yaml."""
    warmup = max(1, min(30, job.steps // 10))
    recipe = {"optimizer": "Muon", "lr_scheduler": "linear", "num_warmup_steps": warmup, "clip_grad_norm": 1.0}
    args, _ = choose_speed(job.args(**recipe, **job.modes, valid_interval=10**6), dict.fromkeys(job.modes, "given"))
    loop, data = opened(args)
    for batch in job.batches(loop.stream):
        loop.train_step(batch)
    data.train.close()
    return loop.backend.unwrap().state_dict()


class Examples(IterableDataset):
    """`steps` batches of our loader."""

    def __init__(self, job: Job) -> None:
        self.loop, self.data = opened(job.args())
        self.job = job

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.job.batches(self.loop.stream):
            yield {name: batch[name] for name in ("input_ids", "attention_mask", "labels") if name in batch}


def configuration(job: Job) -> transformers.T5Config:
    torch.manual_seed(job.seed)
    return transformers.T5Config.from_dict(
        load_model_config(f"{job.data}/model.json").to_dict() | {"dropout_rate": 0.0}
    )


def trainer(job: Job) -> dict[str, torch.Tensor]:
    """transformers' T5 in its Trainer with the Trainer's defaults, but for rate, steps, batch size and modes."""
    model, examples = transformers.T5ForConditionalGeneration(configuration(job)), Examples(job)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(examples, batch_size=None)

    folder = str(job.data / "trainer")
    arguments = transformers.TrainingArguments(
        folder, max_steps=job.steps, learning_rate=job.lr, per_device_train_batch_size=job.options.batch,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), seed=job.seed,
        bf16="bf16" in job.modes, torch_compile="compile" in job.modes,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=examples).train()
    return model.state_dict()


def nanot5(job: Job) -> dict[str, torch.Tensor]:
    """nanoT5's model, AdamWScale, cosine schedule and `train`."""
    from accelerate import Accelerator
    from step_loops import import_nanot5

    parts, steps = import_nanot5(job.options.nanot5), job.steps
    config = configuration(job)
    config.tie_word_embeddings = False
    config.is_bf16 = torch.cuda.is_available() and "bf16" in job.modes
    precision = "bf16" if "bf16" in job.modes else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision)
    model = parts["t5_model"].MyT5(config)
    optimizer = parts["copied_utils"].AdamWScale(model.parameters(), lr=job.lr)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup), eta_min=1e-5),
        ],
        [warmup],
    )
    loader = DataLoader(Examples(job), batch_size=None)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    compiled = torch.compile(model) if "compile" in job.modes else model
    never = SimpleNamespace(every_steps=10**9)
    args = SimpleNamespace(
        mode="pt", current_train_step=1, current_epoch=1, last_log=0.0, eval=never, checkpoint=never,
        optim=SimpleNamespace(total_steps=steps, grad_acc=1, grad_clip=1.0),
        logging=SimpleNamespace(every_steps=100, grad_l2=True, weights_l2=True),
    )  # fmt: skip
    quiet = SimpleNamespace(log_stats=lambda **kwargs: None)
    for name in ("maybe_eval_predict", "maybe_save_checkpoint"):  # the evaluation is ours
        setattr(parts["train_utils"], name, lambda *_: None)
    parts["train_utils"].train(compiled, loader, None, accelerator, schedule, optimizer, quiet, args, None)
    return accelerator.unwrap_model(model).state_dict()


SYSTEMS: dict[str, Callable[[Job], dict[str, torch.Tensor]]] = {"ours": ours, "trainer": trainer, "nanot5": nanot5}


def measured(job: Job, evaluate: bool = True) -> dict[str, Any]:
    """Train, measure the time and evaluate: one line of the results."""
    start = now(job.options.clock)
    weights = {name: value.cpu() for name, value in SYSTEMS[job.system.split("+")[0]](job).items()}
    taken = now(job.options.clock) - start
    steps = [after - before for before, after in pairwise(job.ticks[WARM_UP:])]
    line = {
        "system": job.system, "seed": job.seed, "lr": job.lr, "steps": job.steps, "seconds": round(taken, 1),
        "step": statistics.median(steps), "set_up": taken - job.steps * statistics.mean(steps),
    }  # fmt: skip
    if not evaluate:
        return line
    loop, _ = opened(job.args(), weights)
    values = loop.validate(loop.valid_dataloader)
    return line | {
        "bits_per_byte": round(values["bits_per_byte"], 4), "loss": round(values["loss"], 4),
        "input_tokens": job.options.batch * job.steps * job.args().input_seq_len,
    }  # fmt: skip


def apart(job: Job, name: str = "", **options: Any) -> dict[str, Any]:
    """`measured` in a process of its own; the line of a finished one again."""
    folder = job.data / job.options.commit
    folder.mkdir(exist_ok=True)
    record = folder / f"{job.system}_{job.seed}_{job.lr:g}_{job.options.batch}x{job.steps}{name}.json"
    if not record.is_file():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            record.write_text(json.dumps(process.submit(measured, job, **options).result()))
        print(record.read_text(), file=sys.stderr, flush=True)
    return json.loads(record.read_text())


def steps_that_fit(options: argparse.Namespace, data: Path, rates: dict[str, list[float]]) -> dict[str, int]:
    """Steps of each system that `--seconds` are enough for, by medians of `--rounds` short trainings in turns."""
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in options.systems}
    for turn in range(options.rounds):
        for system, lines in found.items():
            job = Job(system, options, data, options.seeds[0], rates[system][0], options.calibration)
            lines.append(apart(job, f"_{turn}", evaluate=False))
    fit = {}
    for system, lines in found.items():
        set_up, step = (sorted(line[name] for line in lines) for name in ("set_up", "step"))
        fit[system] = max(2, int((options.seconds - statistics.median(set_up)) / statistics.median(step)))
        print(
            f"{system}: {statistics.median(step):.3f} s a step ({step[0]:.3f} to {step[-1]:.3f}), "
            f"{set_up[0]:.1f} to {set_up[-1]:.1f} s to set up, {fit[system]} steps",
            flush=True,
        )
    return fit


def now(clock: str) -> float:
    """Seconds: elapsed, or computed by this process and the children it has waited for (`cpu`)."""
    if clock == "wall":
        return time.perf_counter()
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def prepared(options: argparse.Namespace) -> Path:
    """Folder with a vocabulary of 8,000 pieces and token files of the data, made once."""
    folder = options.work
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(MODEL))
    vocabulary, texts = (
        folder / "vocab.model",
        {name: sorted(map(str, options.data.glob(f"{name}*"))) for name in SPLITS},
    )
    commands = {vocabulary: ["vocab", "--size", "8000", "--output", str(vocabulary), "--input", *texts["train"][:1]]}
    for name in SPLITS:
        output = ["--vocab", str(vocabulary), "--output", str(folder / name)]
        commands[folder / f"{name}.idx"] = ["tokenize", *output, "--input", *texts[name]]
    for made, command in commands.items():
        if not made.is_file():
            subprocess.run([sys.executable, "-m", "lm_experiments_tools.tools.main", *command], check=True)
    return folder


def main() -> None:
    options = parsed()
    data, results = prepared(options), []
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    options.commit = head.stdout.strip()
    if options.clock == "cpu":
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no compiler outlives the time that is measured
    left_out = [system for system in options.systems if system.startswith("nanot5")]
    if left_out and not (options.nanot5 and (options.nanot5 / "nanoT5/utils/t5_model.py").is_file()):
        print(f"{', '.join(left_out)} left out: --nanot5 names no checkout of it")
        options.systems = [system for system in options.systems if system not in left_out]
    given = {name: [float(x) for x in text.split(",")] for name, text in (r.split("=") for r in options.lr)}
    rates = {name: (RATES | given)[name.split("+")[0]] for name in options.systems} | given
    fit = dict.fromkeys(options.systems, options.steps) if options.steps else steps_that_fit(options, data, rates)
    for system in options.systems:
        job = partial(Job, system, options, data, steps=fit[system])
        found = [apart(job(options.seeds[0], lr)) for lr in rates[system]]
        while (best := min(found, key=lambda line: line["bits_per_byte"]))["lr"] == max(line["lr"] for line in found):
            found.append(apart(job(options.seeds[0], 2 * best["lr"])))
        found += [apart(job(seed, best["lr"])) for seed in options.seeds[1:]]
        results += [line | {"best_rate": line["lr"] == best["lr"], "commit": options.commit} for line in found]
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for system in dict.fromkeys(line["system"] for line in results):
        lines = [line for line in results if line["system"] == system and line["best_rate"]]
        bits, first = [line["bits_per_byte"] for line in lines], lines[0]
        print(
            f"| {system} | {first['lr']:g} | {statistics.mean(bits):.4f} | {max(bits) - min(bits):.4f} | "
            f"{first['steps']} | {first['input_tokens']:,} | {first['seconds']} |"
        )
    print(f"\ncommit {options.commit}, torch {torch.__version__}, transformers {transformers.__version__}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="time of a training, set-up included")
    parser.add_argument("--steps", type=int, help="steps of each training, instead of --seconds: equal tokens")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine that is not idle")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), help="SYSTEM[+bf16][+compile]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lr", nargs="+", default=[], help="SYSTEM=RATE[,RATE...], tuned with the first seed")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--calibration", type=int, default=30, help="steps of a training that measures the speed")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each system that measure the speed")
    parser.add_argument("--valid_samples", type=int, default=1024)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of train*.jsonl and valid*.jsonl")
    parser.add_argument("--work", type=Path, default=Path("runs/speedrun"), help="folder of tokens and vocabulary")
    parser.add_argument("--output", type=Path, default=Path("runs/speedrun.json"))
    parser.add_argument("--nanot5", type=Path, help="a checkout of nanoT5")
    return parser.parse_args()


if __name__ == "__main__":
    main()
