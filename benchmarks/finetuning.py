"""Memory and speed of fine-tuning a T5: each option for small memory, and Hugging Face's Seq2SeqTrainer beside them.

    OMP_NUM_THREADS=1 python benchmarks/finetuning.py
    python benchmarks/finetuning.py --device cuda --model_cfg t5-base --batch_size 16 --input_seq_len 512

Two tables. In the first every step is the same full batch (rows without padding), so that each row does the same work
at the largest shape there is; its first part checks that Seq2SeqTrainer has the same losses as ours, without dropout.
In the second the batches are those of the data at their own lengths, which is about padding.

Each measurement is a process of its own; they take turns (A B C, A B C, ...) because a shared machine drifts, and
medians are printed. On a CPU the processes are forked from one that has imported everything, and memory is resident
memory above what that takes: at its peak while the model is loaded and the data read, and at its peak in the steps. So
that freed memory is not resident any more, malloc is told to return each block of 64 KiB and more at once
(MALLOC_MMAP_THRESHOLD_), which costs all rows some time. On a GPU memory is what torch has allocated there.

Tokens are those of sources and targets that are not padding, counted at the model's door for both programs alike; the
clock is CPU time of all threads (GPU: wall time), from the end of the warm-up to the end of the last step, so that
loading of batches, clipping, update and logging are in it.

The weights are random and the data is on the machine, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / "benchmarks/t5_efficient_tiny.json")  # sizes of google/t5-efficient-tiny, 15.6 M parameters
LR, MAX_NORM, SEED = 1e-3, 1.0, 42
TOLERANCE = 1e-3
CHECKED_STEPS = 3
MIB = 2**20
MALLOC = "MALLOC_MMAP_THRESHOLD_"


@dataclass(frozen=True)
class Variant:
    """A row of a table.

    Attributes:
        name: as it is printed.
        flags: of run_finetuning.py; for Seq2SeqTrainer none.
        trainer: arguments of Seq2SeqTrainingArguments; None: our loop.
        gpu_only: why there is nothing to measure without a GPU.
    """

    name: str
    flags: tuple[str, ...] = ()
    trainer: dict[str, Any] | None = None
    gpu_only: str = ""


def ours(flags: str, **about: Any) -> Variant:
    return Variant(flags or "ours, AdamW", tuple(flags.split()), **about)


def theirs(**options: Any) -> Variant:
    said = "".join(f", {key}={value}" for key, value in options.items())
    return Variant(f"Seq2SeqTrainer{said}", trainer=options)


BASELINE = ours("")
OPTIONS = (
    BASELINE,
    theirs(),
    ours("--gradient_checkpointing"),
    theirs(gradient_checkpointing=True),
    ours("--batch_size 2 --gradient_accumulation_steps 4"),
    ours("--optimizer Adafactor"),
    ours("--freeze embeddings"),
    ours("--freeze encoder"),
    ours("--bf16"),
    ours("--peft lora"),
    ours("--peft prompt_tuning"),
    ours("--peft prefix_tuning"),
    ours("--peft lora --quantize int8"),
    ours("--peft lora --quantize nf4"),
    ours("--peft lora --quantize nf4 --gradient_checkpointing"),
    ours("--batch_size 1 --gradient_accumulation_steps 8 --gradient_checkpointing --optimizer Adafactor"),
    ours("--embeddings_on_cpu", gpu_only="without a GPU all of the model is in main memory"),
    ours("--device_map auto", gpu_only="without a GPU there is one device"),
)
PADDING = (
    ours("--bucket_rows 1"),
    replace(BASELINE, name="ours: buckets of similar length (the default)"),
    theirs(),
    theirs(train_sampling_strategy="group_by_length"),
)


@dataclass(frozen=True)
class Setting:
    """Settings that all measurements of a table have in common."""

    folder: str
    data: str
    device: str
    batch_size: int
    input_seq_len: int
    target_seq_len: int
    warm_up: int
    steps: int
    seed: int = SEED
    dropout: float | None = None

    def flags(self, flags: tuple[str, ...]) -> list[str]:
        """Command line of run_finetuning.py; `flags` are a row's own."""
        every = {
            "from_pretrained": f"{self.folder}/model",
            "data_path": self.data,
            "batch_size": self.batch_size,
            "input_seq_len": self.input_seq_len,
            "target_seq_len": self.target_seq_len,
            "iters": self.warm_up + self.steps,
            "lr": LR,
            "clip_grad_norm": MAX_NORM,
            "seed": self.seed,
            "metrics": "none",
        }
        if self.dropout is not None:
            every["dropout_rate"] = self.dropout
        given = [part for name, value in every.items() if f"--{name}" not in flags for part in (f"--{name}", value)]
        return [*map(str, given), *flags]


# ---- measuring ------------------------------------------------------------------------------------------------------
@dataclass
class Meter:
    """Counts what enters the model, and reads memory and clocks."""

    device: str
    tokens: int = 0
    cells: int = 0
    losses: list[Any] = field(default_factory=list)
    readings: list[tuple[float, float, int, int, int]] = field(default_factory=list)
    base: int = 0
    loading: int = 0
    every = 1

    def __post_init__(self) -> None:
        self.base = self._resident("VmRSS") if self.device == "cpu" else 0

    def _resident(self, name: str) -> int:
        """Bytes, from Linux: VmRSS is what is resident now, VmHWM its peak since it was last reset."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024

    def peak(self) -> int:
        """Bytes at the most since the last reset."""
        if self.device == "cpu":
            return self._resident("VmHWM") - self.base
        import torch

        return torch.cuda.max_memory_allocated()

    def start(self, model: Any) -> None:
        """The model is loaded; steps begin."""
        self.loading = self.peak()
        if self.device == "cpu":
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        else:
            import torch

            torch.cuda.reset_peak_memory_stats()
        model.register_forward_pre_hook(self._enters, with_kwargs=True)
        model.register_forward_hook(lambda module, inputs, outputs: self.losses.append(outputs["loss"].detach()))

    def _enters(self, module: Any, positional: tuple, inputs: dict[str, Any]) -> None:
        mask, labels = inputs["attention_mask"], inputs["labels"]
        self.tokens += int(mask.sum()) + int((labels != -100).sum())
        self.cells += mask.numel() + labels.numel()

    def __call__(self, *_: Any) -> None:
        """The end of a step: a hook of our loop."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        self.readings.append((time.process_time(), time.perf_counter(), self.tokens, self.cells, len(self.losses)))

    def result(self, warm_up: int) -> dict[str, Any]:
        first, last = self.readings[warm_up - 1], self.readings[-1]
        cpu, wall, tokens, cells, _ = (b - a for a, b in zip(first, last, strict=True))
        edges = [0, *(reading[4] for reading in self.readings)]
        losses = [float(value) for value in self.losses]
        per_step = [losses[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        return {
            "loading": self.loading / MIB,
            "peak": self.peak() / MIB,
            "cpu_rate": tokens / cpu,
            "rate": tokens / wall,
            "padding": 1 - tokens / cells,
            "losses": [sum(each) / len(each) for each in per_step],
        }


def run_ours(setting: Setting, variant: Variant) -> dict[str, Any]:
    """The run of run_finetuning.py, with a meter."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.config.cli import parse
    from lm_experiments_tools.config.finetuning import FinetuningArgs
    from lm_experiments_tools.models.pretrained import pretrained_model
    from lm_experiments_tools.models.tokenizers import load_tokenizer
    from lm_experiments_tools.recipes.common import optimizer_from_args, seed_worker
    from lm_experiments_tools.recipes.finetuning import finetuning_loop
    from lm_experiments_tools.recipes.finetuning_data import finetuning_data

    args, origins = parse(FinetuningArgs, setting.flags(variant.flags))
    args = args.resolved(origins)
    backend = get_backend(args)
    meter = Meter(setting.device)
    tokenizer = load_tokenizer(args)
    data = finetuning_data(args, backend, tokenizer)
    model = pretrained_model(args, tokenizer)
    optimizer = optimizer_from_args(args, model)
    seed_worker(args.seed, backend.rank)
    loop = finetuning_loop(args, backend, model, optimizer, data, tokenizer)

    loop.callbacks.insert(0, meter)
    meter.start(backend.unwrap())
    loop.train()
    return meter.result(setting.warm_up)


def run_theirs(setting: Setting, variant: Variant) -> dict[str, Any]:
    """Seq2SeqTrainer on the same weights, rows, batch and updates."""
    import transformers

    meter = Meter(setting.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{setting.folder}/model")
    changed = {} if setting.dropout is None else {"dropout_rate": setting.dropout}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(f"{setting.folder}/model", **changed)
    rows = []
    for line in Path(setting.data).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        entry = tokenizer(row["source"], max_length=setting.input_seq_len, truncation=True)
        target = tokenizer(text_target=row["target"], max_length=setting.target_seq_len, truncation=True)
        rows.append({**entry, "labels": target["input_ids"]})

    class EachStep(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **others: Any) -> None:
            meter()

    options = transformers.Seq2SeqTrainingArguments(
        f"{setting.folder}/trainer", max_steps=setting.warm_up + setting.steps, learning_rate=LR,
        per_device_train_batch_size=setting.batch_size, lr_scheduler_type="constant", max_grad_norm=MAX_NORM,
        seed=setting.seed, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=setting.device == "cpu",
        dataloader_pin_memory=setting.device != "cpu", **variant.trainer,
    )  # fmt: skip
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model, padding="longest", pad_to_multiple_of=8)
    callbacks = [EachStep()]
    trainer = transformers.Seq2SeqTrainer(
        model, options, collator, rows, processing_class=tokenizer, callbacks=callbacks
    )
    meter.start(model)
    trainer.train()
    return meter.result(setting.warm_up)


def measure(setting: Setting, variant: Variant) -> dict[str, Any]:
    """One measurement; {"error": sentence} where the option is refused."""
    import torch

    from lm_experiments_tools.errors import UserError

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return (run_ours if variant.trainer is None else run_theirs)(setting, variant)
    except UserError as error:
        return {"error": str(error)}


def context_of(device: str) -> BaseContext:
    """How processes are started: forked, unless CUDA is in them, which does not survive it."""
    return multiprocessing.get_context("fork" if device == "cpu" else "spawn")


def in_process(setting: Setting, variant: Variant) -> dict[str, Any]:
    """`measure` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=context_of(setting.device)) as pool:
        try:
            return pool.submit(measure, setting, variant).result()
        except BrokenProcessPool:
            sys.exit(f"{variant.name} failed; what it said is above.")


def import_everything() -> None:
    """Import all that a measurement needs, so that forked processes differ in what they train alone."""
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    from transformers import BitsAndBytesConfig, Seq2SeqTrainer, T5ForConditionalGeneration  # noqa: F401

    import lm_experiments_tools.backends.accelerate
    import lm_experiments_tools.models.pretrained  # noqa: F401

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


# ---- report ---------------------------------------------------------------------------------------------------------
Found = dict[str, list[dict[str, Any]]]


def check_same_work(setting: Setting) -> None:
    """Both programs have the same losses on the same batch, without dropout. Ends the program where they have not."""
    without = replace(setting, dropout=0.0, warm_up=1, steps=CHECKED_STEPS - 1)
    both = [in_process(without, variant) for variant in (BASELINE, theirs())]
    if "error" in both[0]:
        sys.exit(both[0]["error"])
    losses = [each["losses"] for each in both]
    shown = " and ".join(", ".join(f"{loss:.4f}" for loss in each) for each in losses)
    if max(abs(a - b) for a, b in zip(*losses, strict=True)) > TOLERANCE:
        sys.exit(f"the programs do not train the same: losses {shown}")
    print(f"Losses of ours and of Seq2SeqTrainer without dropout: {shown}.\n", flush=True)


def rounds_of(setting: Setting, variants: list[Variant], rounds: int, new_batches: bool = False) -> Found:
    """All measurements, in turns; with `new_batches` each round has others."""
    found: Found = {variant.name: [] for variant in variants}
    for number in range(rounds):
        here = replace(setting, seed=SEED + number) if new_batches else setting
        for variant in variants:
            if found[variant.name] and "error" in found[variant.name][-1]:
                continue
            found[variant.name].append(in_process(here, variant))
            print(f"round {number} {variant.name}: {found[variant.name][-1]}", file=sys.stderr, flush=True)
    return found


def table(found: Found, columns: dict[str, Callable[[list[dict[str, Any]]], str]], baseline: str) -> str:
    """Markdown; the ratio is to the row `baseline`."""
    measured = {name: rounds for name, rounds in found.items() if "error" not in rounds[0]}
    lines = ["| | " + " | ".join(columns) + f" | times {baseline} |", "|---|" + "---:|" * (len(columns) + 1)]
    for name, rounds in measured.items():
        ratio = median(a["cpu_rate"] / b["cpu_rate"] for a, b in zip(rounds, measured[baseline], strict=True))
        lines.append(f"| {name} | " + " | ".join(show(rounds) for show in columns.values()) + f" | {ratio:.2f} |")
    return "\n".join(lines)


def _middle(name: str, form: str = ",.0f") -> Callable[[list[dict[str, Any]]], str]:
    return lambda rounds: format(median(each[name] for each in rounds), form)


def _every(name: str) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rounds: ", ".join(f"{each[name]:,.0f}" for each in rounds)


def print_tables(options: argparse.Namespace, setting: Setting, variants: list[Variant]) -> None:
    measurable = [v for v in variants if not (v.gpu_only and options.device == "cpu")]
    unit = "CPU-second" if options.device == "cpu" else "second"
    speed = "cpu_rate" if options.device == "cpu" else "rate"
    speeds = {f"tokens per {unit}, median": _middle(speed), "all rounds": _every(speed)}
    found = rounds_of(setting, measurable, options.rounds)
    base = median(each["peak"] for each in found[BASELINE.name])
    memory = {
        "loading, MiB": _middle("loading"),
        "steps, MiB": _middle("peak"),
        "of AdamW's": lambda rounds: format(median(each["peak"] for each in rounds) / base, ".2f"),
    }
    print(table(found, {**memory, **speeds}, BASELINE.name), flush=True)
    refused = {name: rounds[0]["error"] for name, rounds in found.items() if "error" in rounds[0]}
    refused |= {v.name: v.gpu_only for v in variants if v not in measurable}
    for name, reason in refused.items():
        print(f"\nNot measured: {name} ({reason}).")
    if options.real_steps:
        real = replace(setting, data=f"{setting.folder}/real.jsonl", steps=options.real_steps)
        real = replace(real, input_seq_len=options.real_input_len, target_seq_len=options.real_target_len)
        found = rounds_of(real, list(PADDING), options.rounds, new_batches=True)
        print("\n" + table(found, {"padding": _middle("padding", ".0%"), **speeds}, "Seq2SeqTrainer"))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_cfg", default=TINY, help="preset or file; its weights are random")
    parser.add_argument("--data_path", help="text to text; default SciTLDR, or Python's own documentation")
    parser.add_argument("--vocab", type=Path, help="SentencePiece model; default T5's, or one trained on the data")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--input_seq_len", type=int, default=128, help="of the full rows")
    parser.add_argument("--target_seq_len", type=int, default=32, help="of the full rows")
    parser.add_argument("--warm_up", type=int, default=1, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of full batches")
    parser.add_argument(
        "--real_steps", type=int, default=8, help="measured steps of the second table; 0: leave it out"
    )
    parser.add_argument("--real_input_len", type=int, default=512, help="most tokens of a source there")
    parser.add_argument("--real_target_len", type=int, default=128, help="most tokens of a target there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose name contains one of these")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.device == "cpu" and MALLOC not in os.environ:  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {MALLOC: str(2**16)})
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(ROOT))
    from benchmarks.finetuning_task import prepare
    from lm_experiments_tools.config.cli import run_main

    if options.device == "cpu":
        import_everything()
    variants = list(OPTIONS)
    if options.only:
        variants = [v for v in variants if v == BASELINE or any(text in v.name for text in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: what it frees would be used again by the forked ones, and not be counted
        maker = context_of(options.device).Process(
            target=run_main, args=(partial(prepare, options, Path(folder), SEED),)
        )
        maker.start()
        maker.join()
        if maker.exitcode:
            sys.exit(maker.exitcode)
        print(headline(options), flush=True)
        setting = Setting(
            folder, f"{folder}/full.jsonl", options.device, options.batch_size, options.input_seq_len,
            options.target_seq_len, options.warm_up, options.steps,
        )  # fmt: skip
        check_same_work(setting)
        print_tables(options, setting, variants)


def headline(options: argparse.Namespace) -> str:
    import torch
    import transformers

    machine = f"{options.device}, {os.environ['OMP_NUM_THREADS']} thread(s), load {os.getloadavg()[0]:.1f}"
    return (
        f"{Path(options.model_cfg).stem}, {options.batch_size} rows of {options.input_seq_len} and "
        f"{options.target_seq_len} tokens; {options.rounds} interleaved rounds of {options.steps} steps after "
        f"{options.warm_up}; {machine}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}.\n"
    )


if __name__ == "__main__":
    main()
