"""One training step: ours beside transformers' model in a bare loop and in Trainer, and beside nanoT5.

    python benchmarks/step.py                          # all shapes; without a checkout, nanoT5 is left out
    git clone https://github.com/PiotrNawrot/nanoT5 && python benchmarks/step.py --nanot5 nanoT5 --shape t5-v1_1-small

Each loop trains in a process of its own and waits for its turn in the source of its batches. The turns go round robin,
one step each, so that whatever else the machine does falls on all alike. On a CPU the clock is the CPU time of the
process on one thread, on a GPU wall time. tokens/s counts inputs and targets without padding. The ratio is to the
first loop named. T5 trains without dropout, as nanoT5 does, BERT with its own 0.1. Rows of real lengths stand in the
order that each program reads them in: ours by length, Trainer's at random; their tokens/s is of all steps together.
The share of peak is of what the loop computes, of the best matrix product (2048 x 512 by 512 x 1024) of the same run.
Memory is the largest resident set of the process (CPU) or what CUDA allocated. No network or TensorFlow is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from step_data import MASKED, batches_of
from step_loops import LOOPS, NANOT5_MODEL, Shape, config_of, nanot5
from torch import Tensor
from torch.utils.data import IterableDataset

from lm_experiments_tools.training import flops

SHAPES = {
    "t5-v1_1-small, 4 x 512/114": Shape("t5-v1_1-small", 4, 512, 114, rounds=8),
    "t5-v1_1-small, 8 x 512/114": Shape("t5-v1_1-small", 8, 512, 114),
    "t5-v1_1-base, 2 x 512/114": Shape("t5-v1_1-base", 2, 512, 114),
    "t5-v1_1-base, 128 x 512/114": Shape("t5-v1_1-base", 128, 512, 114),
    "bert-base, 8 x 128": Shape("bert_base_uncased", 8, 128, rounds=6),
    "bert-base, 4 x 512": Shape("bert_base_uncased", 4, 512),
    "fine-tuning, t5-v1_1-small, 8 rows of SciTLDR": Shape("t5-v1_1-small", 8, 512, 128, rounds=12, real_lengths=True),
}
GPU_ONLY = ("t5-v1_1-base, 128 x 512/114",)


class Turns(IterableDataset):
    """Batches that are handed out when the parent says so, with what the step before them cost."""

    def __init__(self, batches: Iterator[dict[str, Tensor]], out: object) -> None:
        self.batches, self.out = batches, out

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        on_gpu = torch.cuda.is_available()
        for batch in self.batches:
            if on_gpu:
                torch.cuda.synchronize()
            print(json.dumps({"cpu": time.process_time(), "wall": time.time(), "memory": memory()}), file=self.out)
            self.out.flush()
            if not sys.stdin.readline():
                os._exit(0)
            start = {"cpu": time.process_time(), "wall": time.time(), "tokens": tokens_of(batch)}
            print(json.dumps(start), file=self.out)
            yield batch


def memory() -> float:
    """MiB: what CUDA allocated at most, or the largest resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tokens_of(batch: dict[str, Tensor]) -> int:
    inputs = int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
    is_bert = "token_type_ids" in batch
    return inputs if is_bert else inputs + int((batch["labels"] != -100).sum())


def train_in_turns(loop: str, shape: Shape, precision: str, checkout: Path | None) -> None:
    """Body of a worker: trains with the loop until the parent is gone."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what loops print goes to stderr
    batches = Turns(batches_of(shape, config_of(shape).vocab_size, loop.startswith("ours")), out)
    if "nanoT5" in loop:
        nanot5(shape, batches, precision, checkout, compiled="compiled" in loop)
    else:
        LOOPS[loop](shape, batches, precision)


class Worker:
    """A process with one loop, which makes a step at a time."""

    def __init__(self, loop: str, name: str, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", loop, "--shape", name, "--precision", options.precision]
        if options.nanot5:
            command += ["--nanot5", str(options.nanot5)]
        self.log = open(options.logs / f"{name}-{loop}.log".replace("/", "_").replace(" ", "_"), "w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1
        )
        self.steps: list[dict[str, float]] = []
        self.failed = not self._read()

    def _read(self) -> dict[str, float] | None:
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def step(self) -> None:
        """Let it train on one batch (a loop that fetches ahead trains on the one before)."""
        try:
            self.process.stdin.write("go\n")
            start, end = self._read(), self._read()
        except BrokenPipeError:
            start = end = None
        if start is None or end is None:
            self.failed = True
            return
        self.steps.append(
            {"cpu": end["cpu"] - start["cpu"], "wall": end["wall"] - start["wall"]}
            | {"tokens": start["tokens"], "memory": end["memory"]}
        )

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def measured_peak(precision: str) -> float:
    """FLOP/s of the best of many matrix products."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return flops.measured_peak(device, dtype, time.perf_counter if device.type == "cuda" else time.process_time)


def flops_of(shape: Shape, loop: str) -> float:
    """FLOP of a loop's step of full rows; of BERT, ours scores words for the masked tokens alone."""
    config = config_of(shape)
    if shape.is_t5:
        return flops.t5_flops(config, shape.rows, shape.inputs, shape.targets)
    scored = round(MASKED * shape.inputs) if loop.startswith("ours") else shape.inputs
    return flops.bert_flops(config, shape.rows, shape.inputs, shape.rows * scored)


def compare(name: str, loops: list[str], options: argparse.Namespace) -> list[str]:
    """Run all loops of a shape in turns; returns the lines of its table."""
    shape, clock = SHAPES[name], "wall" if torch.cuda.is_available() else "cpu"
    workers: dict[str, Worker] = {}
    for loop in loops:  # one after another, so that they do not compile at once
        workers[loop] = Worker(loop, name, options)
        for _ in range(options.warm_up):
            if not workers[loop].failed:
                workers[loop].step()
        print(f"{name}: {loop} {'failed, see its log' if workers[loop].failed else 'is warm'}", flush=True)
    for _ in range(options.rounds or shape.rounds):
        for worker in workers.values():
            if not worker.failed:
                worker.step()
    peak, lines, base = measured_peak(options.precision), [], None
    for loop, worker in workers.items():
        worker.close()
        steps = worker.steps[options.warm_up :]
        if worker.failed or not steps:
            lines.append(f"| {loop} | failed | | | | |")
            continue
        rates = [step["tokens"] / step[clock] for step in steps]
        rate, fastest = statistics.median(rates), max(rates)
        if shape.real_lengths:  # steps differ in what they hold
            rate = sum(step["tokens"] for step in steps) / sum(step[clock] for step in steps)
        base = base or (rate, fastest)
        share = "" if shape.real_lengths else f"{flops_of(shape, loop) / min(s[clock] for s in steps) / peak:.0%}"
        lines.append(
            f"| {loop} | {statistics.median(s[clock] for s in steps):.2f} | {rate:.0f} | {rate / base[0]:.2f} "
            f"({fastest / base[1]:.2f}) | {steps[-1]['memory']:.0f} | {share} |"
        )
    head = f"| loop | s/step | tokens/s | ratio to {next(iter(workers))} | MiB | of peak |\n|---|---|---|---|---|---|"
    return [f"## {name}, {options.precision}", "", f"Peak {peak / 1e12:.2f} TFLOP/s.", "", head, *lines, ""]


def loops_of(shape: Shape) -> list[str]:
    """Those that are compared where none are named."""
    if shape.real_lengths:
        return ["transformers Trainer", "ours, --speed off", "ours, not compiled"]  # as fine-tuning is by default
    as_chosen = "ours, compiled" if shape.is_t5 else "ours, not compiled"  # by --speed auto, so "ours" again
    loops = [loop for loop in LOOPS if loop != as_chosen]
    if not shape.is_t5:
        return [loop for loop in loops if "nanoT5" not in loop]
    if shape.preset != "t5-v1_1-small" or shape.rows != 4:  # compiling takes longer than the steps: once is enough
        loops = [loop for loop in loops if not (loop.startswith("transformers") and "compiled" in loop)]
    return loops


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what would fail, or be left out unsaid, after minutes of other loops."""
    if options.nanot5 and not (options.nanot5 / NANOT5_MODEL).is_file():
        parser.error(f"--nanot5 {options.nanot5} is no checkout of nanoT5: it has no {NANOT5_MODEL}")
    if not options.nanot5 and any("nanoT5" in loop for loop in options.loops or ()):
        parser.error("--loops nanoT5 needs --nanot5, a checkout of it")
    if options.rounds is not None and options.rounds < 1 or options.warm_up < 0:
        parser.error("--rounds is at least 1, --warm_up at least 0")
    if options.output and (options.output.is_dir() or not options.output.absolute().parent.is_dir()):
        parser.error(f"--output {options.output} is no file in a folder that exists")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", help="parts of names of shapes: " + "; ".join(SHAPES))
    parser.add_argument("--loops", nargs="*", choices=LOOPS, help="those to compare, the one to relate to first")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, help="measured steps of each loop; default: the shape's, 4 to 12")
    parser.add_argument("--warm_up", type=int, default=2, help="steps of each loop before")
    parser.add_argument("--nanot5", type=Path, help="a checkout of nanoT5; without one it is left out")
    parser.add_argument("--output", type=Path, help="default: step_cpu.md or step_<GPU>.md beside this script")
    parser.add_argument("--logs", type=Path, default=Path("runs/bench_step"), help="folder of what the loops print")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train_in_turns(options.worker, SHAPES[options.shape[0]], options.precision, options.nanot5)
        return
    check(parser, options)
    options.logs.mkdir(parents=True, exist_ok=True)
    names = [n for n in SHAPES if any(part in n for part in options.shape or [""])]
    if not options.shape and not torch.cuda.is_available():
        names = [n for n in names if n not in GPU_ONLY]
    if not names:
        parser.error(f"--shape {' '.join(options.shape)} is part of no shape: {'; '.join(SHAPES)}")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    output = options.output or Path(__file__).with_name(f"step_{where.replace(' ', '_').lower()}.md")
    text = ["# A training step", "", f"`{' '.join(['python', *sys.argv])}`", ""]
    text += [
        f"{where}, {platform.processor() or platform.machine()}; torch {torch.__version__}; one thread; medians of "
    ]
    text[-1] += f"{options.rounds or '4 to 12'} interleaved steps, in parentheses the ratio of the fastest."
    text += ["Each loop's cost is explained at the head of benchmarks/step.py.", ""]
    for name in names:
        loops = options.loops or loops_of(SHAPES[name])
        loops = [loop for loop in loops if options.nanot5 or "nanoT5" not in loop]
        lines = compare(name, loops, options)
        print("\n".join(lines), flush=True)
        text += lines
        output.write_text("\n".join(text))


if __name__ == "__main__":
    main()
