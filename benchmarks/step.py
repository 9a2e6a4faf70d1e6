"""One training step: ours beside transformers' model in a bare loop and in Trainer, and beside nanoT5.

    python benchmarks/step.py                          # all shapes; without a checkout, nanoT5 is left out
    git clone https://github.com/PiotrNawrot/nanoT5 && python benchmarks/step.py --nanot5 nanoT5 --shape t5-v1_1-small

Each loop trains in a process of its own and waits for its turn in the source of its batches. The turns go round robin,
one step each, so that whatever else the machine does falls on all alike. The clock is the CPU time of the process on
one thread; a GPU is measured by benchmarks/gpu.py, which starts the same workers. tokens/s counts inputs and targets
without padding. The ratio is to the first loop named. T5 trains without dropout, as nanoT5 does, BERT with its own
0.1. Rows of real lengths stand in the order that each program reads them in: ours by length, Trainer's at random;
their tokens/s is of all steps together. The share of peak is of what the loop computes, of the best matrix product
(2048 x 512 by 512 x 1024) of the same run. Memory is the largest resident set of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from gpu_trace import by_kind, idle_share, kernels_in, profiler_of
from peaks import measured_peak
from step_data import MASKED, batches_of
from step_loops import LOOPS, NANOT5_MODEL, Shape, config_of, nanot5
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedConfig

from lm_experiments_tools.modules.devices import has_bf16
from lm_experiments_tools.training.flops import data_sheet_peak

SHAPES = {
    "t5-v1_1-small, 4 x 512/114": Shape("t5-v1_1-small", 4, 512, 114, rounds=8),
    "t5-v1_1-small, 8 x 512/114": Shape("t5-v1_1-small", 8, 512, 114),
    "t5-v1_1-base, 2 x 512/114": Shape("t5-v1_1-base", 2, 512, 114),
    "bert-base, 8 x 128": Shape("bert_base_uncased", 8, 128, rounds=6),
    "bert-base, 4 x 512": Shape("bert_base_uncased", 4, 512),
    "fine-tuning, t5-v1_1-small, 8 rows of SciTLDR": Shape("t5-v1_1-small", 8, 512, 128, rounds=12, real_lengths=True),
}
DRAWN = 8  # batches that are drawn once and repeated on a GPU, where drawing one takes longer than a step


class Turns(IterableDataset):
    """Batches that are handed out when the parent says how many; what a turn cost is reported at its end.

    A number below 0 asks for so many steps under the profiler.
    """

    def __init__(self, batches: Iterator[dict[str, Tensor]], out: object) -> None:
        self.batches, self.out = batches, out

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while steps := int(sys.stdin.readline() or 0):
            cpu, wall, tokens = time.process_time(), time.perf_counter(), 0
            profiler = profiler_of("cuda" if torch.cuda.is_available() else "cpu") if steps < 0 else nullcontext()
            with profiler:
                for _ in range(abs(steps)):
                    batch = next(self.batches)
                    tokens += tokens_of(batch)
                    yield batch
                host = time.perf_counter() - wall
                if torch.cuda.is_available():  # steps are launched asynchronously
                    torch.cuda.synchronize()
            turn = {"steps": abs(steps), "cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            if steps < 0:
                kernels = kernels_in(profiler)
                turn |= {"kernels": by_kind(kernels, -steps), "idle": idle_share(kernels)}
            print(json.dumps({**turn, "host": host, "tokens": tokens, **memory()}), file=self.out, flush=True)
        os._exit(0)


def memory() -> dict[str, float]:
    """MiB: CUDA's peak of allocated and of reserved memory, or the largest resident set."""
    if torch.cuda.is_available():
        peaks = {"memory": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return {name: peak / 2**20 for name, peak in peaks.items()}
    return {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def tokens_of(batch: dict[str, Tensor]) -> int:
    inputs = int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
    is_bert = "token_type_ids" in batch
    return inputs if is_bert else inputs + int((batch["labels"] != -100).sum())


def train_in_turns(loop: str, shape: Shape, precision: str, checkout: Path | None) -> None:
    """Body of a worker: trains with the loop until the parent is gone."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what loops print goes to stderr
    batches = batches_of(shape, config_of(shape).vocab_size, loop.startswith("ours"))
    if torch.cuda.is_available():
        batches = itertools.cycle(list(itertools.islice(batches, DRAWN)))
    if "nanoT5" in loop:
        nanot5(shape, Turns(batches, out), precision, checkout, compiled="compiled" in loop)
    else:
        LOOPS[loop](shape, Turns(batches, out), precision)


def environment_of(tree: Path) -> dict[str, str]:
    """Environment of a process that imports our packages from another checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}


class Worker:
    """A process that trains with one loop, a turn at a time; `tree` is where it imports our packages from."""

    def __init__(
        self,
        loop: str,
        shape: Shape,
        precision: str,
        logs: Path,
        checkout: Path | None = None,
        tree: Path | None = None,
    ) -> None:
        command = [sys.executable, __file__, "--worker", loop, json.dumps(asdict(shape)), "--precision", precision]
        if checkout:
            command += ["--nanot5", str(checkout)]
        name = f"{Path(shape.preset).stem}-{shape.rows}-{loop}{'-before' if tree else ''}"
        name = name.replace("/", "_").replace(" ", "_")
        self.path = logs / f"{name}.log"
        self.log = self.path.open("w")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
            env=environment_of(tree) if tree else None,
        )
        self.turns: list[dict[str, float]] = []
        self.failed = False

    def begin(self, steps: int) -> None:
        """Let it train on so many batches (a loop that fetches ahead is one batch late); below 0: traced."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps}\n")

    def finish(self) -> None:
        """Wait for the end of the turn."""
        line = self.process.stdout.readline()
        self.failed = not line
        if line:
            self.turns.append(json.loads(line))

    def step(self) -> None:
        """Let it train on one batch."""
        self.begin(1)
        self.finish()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def peak_of(precision: str) -> float:
    """Peak FLOP/s of the GPU's data sheet, otherwise of the fastest of many matrix products."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return data_sheet_peak(device, dtype) or measured_peak(device, dtype)


def flops_of(shape: Shape, loop: str) -> float:
    """FLOP of a loop's step of full rows; of BERT, ours scores words for the masked tokens alone."""
    config = config_of(shape)
    if shape.is_t5:
        return t5_flops(config, shape.rows, shape.inputs, shape.targets)
    scored = round(MASKED * shape.inputs) if loop.startswith("ours") else shape.inputs
    return bert_flops(config, shape.rows, shape.inputs, shape.rows * scored)


def t5_flops(config: PreTrainedConfig, rows: int, inputs: int, targets: int) -> float:
    """FLOP of a forward and a backward pass of T5ForConditionalGeneration over `inputs` and `targets` tokens a row."""
    width, inner = config.d_model, config.num_heads * config.d_kv
    feed_forward = (3 if config.is_gated_act else 2) * width * config.d_ff
    encoder = inputs * (4 * width * inner + feed_forward) + 2 * inputs * inputs * inner
    decoder = targets * (6 * width * inner + feed_forward) + 2 * inputs * width * inner
    decoder += 2 * targets * (targets + inputs) * inner
    layers = config.num_layers * encoder + config.num_decoder_layers * decoder
    return 6.0 * rows * (layers + targets * width * config.vocab_size)


def bert_flops(config: PreTrainedConfig, rows: int, inputs: int, scored: int) -> float:
    """FLOP of a forward and a backward pass of BertForMaskedLM; its head scores `scored` tokens of all rows."""
    width, inner = config.hidden_size, config.intermediate_size
    layer = inputs * (4 * width * width + 2 * width * inner) + 2 * inputs * inputs * width
    return 6.0 * (rows * config.num_hidden_layers * layer + scored * width * (width + config.vocab_size))


def compare(name: str, loops: list[str], options: argparse.Namespace) -> list[str]:
    """Run all loops of a shape in turns; returns the lines of its table."""
    shape = SHAPES[name]
    workers: dict[str, Worker] = {}
    for loop in loops:  # one after another, so that they do not compile at once
        workers[loop] = Worker(loop, shape, options.precision, options.logs, options.nanot5)
        for _ in range(options.warm_up):
            if not workers[loop].failed:
                workers[loop].step()
        print(f"{name}: {loop} {'failed, see its log' if workers[loop].failed else 'is warm'}", flush=True)
    for _ in range(options.rounds or shape.rounds):
        for worker in workers.values():
            if not worker.failed:
                worker.step()
    peak, lines, base = peak_of(options.precision), [], None
    for loop, worker in workers.items():
        worker.close()
        steps = worker.turns[options.warm_up :]
        if worker.failed or not steps:
            lines.append(f"| {loop} | failed | | | | |")
            continue
        rates = [step["tokens"] / step["cpu"] for step in steps]
        rate, fastest = statistics.median(rates), max(rates)
        if shape.real_lengths:  # steps differ in what they hold
            rate = sum(step["tokens"] for step in steps) / sum(step["cpu"] for step in steps)
        base = base or (rate, fastest)
        share = "" if shape.real_lengths else f"{flops_of(shape, loop) / min(s['cpu'] for s in steps) / peak:.0%}"
        lines.append(
            f"| {loop} | {statistics.median(s['cpu'] for s in steps):.2f} | {rate:.0f} | {rate / base[0]:.2f} "
            f"({fastest / base[1]:.2f}) | {steps[-1]['memory']:.0f} | {share} |"
        )
    head = f"| loop | s/step | tokens/s | ratio to {next(iter(workers))} | MiB | of peak |\n|---|---|---|---|---|---|"
    return [f"## {name}, {options.precision}", "", f"Peak {peak / 1e12:.2f} TFLOP/s.", "", head, *lines, ""]


def loops_of(shape: Shape) -> list[str]:
    """Those that are compared where none are named."""
    if shape.real_lengths:
        return ["transformers Trainer", "ours, --speed off", "ours, not compiled"]  # as fine-tuning is by default
    as_chosen = "ours, compiled" if shape.is_t5 else "ours, not compiled"  # by --speed auto, so "ours" again
    loops = [loop for loop in LOOPS if loop not in (as_chosen, "ours, CUDA graphs")]
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
    if (options.rounds is not None and options.rounds < 1) or options.warm_up < 0:
        parser.error("--rounds is at least 1, --warm_up at least 0")
    if options.output and (options.output.is_dir() or not options.output.absolute().parent.is_dir()):
        parser.error(f"--output {options.output} is no file in a folder that exists")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", help="parts of names of shapes: " + "; ".join(SHAPES))
    parser.add_argument("--loops", nargs="*", choices=LOOPS, help="those to compare, the one to relate to first")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16" if has_bf16("cpu") else "fp32")
    parser.add_argument("--rounds", type=int, help="measured steps of each loop; default: the shape's, 4 to 12")
    parser.add_argument("--warm_up", type=int, default=2, help="steps of each loop before")
    parser.add_argument("--nanot5", type=Path, help="a checkout of nanoT5; without one it is left out")
    parser.add_argument("--output", type=Path, help="default: step_cpu.md beside this script")
    parser.add_argument("--logs", type=Path, default=Path("runs/bench_step"), help="folder of what the loops print")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        loop, shape = options.worker
        train_in_turns(loop, Shape(**json.loads(shape)), options.precision, options.nanot5)
        return
    if torch.cuda.is_available():
        parser.error("this benchmark measures CPU time; run benchmarks/gpu.py for the GPU, or hide it")
    check(parser, options)
    options.logs.mkdir(parents=True, exist_ok=True)
    names = [n for n in SHAPES if any(part in n for part in options.shape or [""])]
    if not names:
        parser.error(f"--shape {' '.join(options.shape)} is part of no shape: {'; '.join(SHAPES)}")
    output = options.output or Path(__file__).with_name("step_cpu.md")
    text = ["# A training step", "", f"`{' '.join(['python', *sys.argv])}`", ""]
    text += [f"cpu, {platform.processor() or platform.machine()}; torch {torch.__version__}; one thread; medians of "]
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
