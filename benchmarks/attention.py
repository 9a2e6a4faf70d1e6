"""Forward and backward of attention with a T5 bias on a CPU, next to PyTorch's. Writes benchmarks/attention.md.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Contenders of a length are interleaved (A B C A B C ...), so that other load on the machine affects all of them, and
ratios are medians of the ratios within a round. Times are process CPU time; memory is how far one pass raises the
resident set of a process of its own. A contender that takes longer than --slowest gets one pass at that length and
none at longer ones; one whose score matrices would not fit into --limit is left out. GPUs: benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from lm_experiments_tools.attention import T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels.bias import t5_bucket
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig, BSLongformerSparsityConfig

HEADS, HEAD_DIM = 8, 64
BASELINE = "SDPA, learned bias"
MATRICES = {"eager, learned bias": 6, BASELINE: 6, "SDPA, frozen bias": 2}  # N x N tensors at the same time, about


@dataclass
class Inputs:
    """q, k, v [1, heads, length, head_dim] and the weight of a T5 bias, all with gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    frozen: Tensor | None = None

    def matrix(self) -> Tensor:
        """The bias as T5 implementations make it: buckets of all pairs, embedded."""
        position = torch.arange(self.q.shape[2])
        buckets = t5_bucket(position[None, :] - position[:, None], True, 32, 128)
        return self.weight[buckets].permute(2, 0, 1)[None].to(self.q.dtype)


def make_inputs(length: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    drawn = [torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype) for _ in range(3)]
    return Inputs(*(x.requires_grad_() for x in (*drawn, torch.randn(32, HEADS))))


def eager(x: Inputs) -> Tensor:
    scores = x.q @ x.k.mT * x.q.shape[3] ** -0.5 + x.matrix()
    return scores.float().softmax(-1).to(x.q.dtype) @ x.v


def with_frozen_bias(x: Inputs) -> Tensor:
    if x.frozen is None:
        x.frozen = x.matrix().detach()
    return sdpa(x.q, x.k, x.v, attn_mask=x.frozen)


def ours(layout: object, bias: bool = True) -> Callable[[Inputs], Tensor]:
    return lambda x: block_sparse_attention(x.q, x.k, x.v, layout, T5Bias(x.weight) if bias else None)


def contenders() -> dict[str, Callable[[Inputs], Tensor]]:
    bigbird64, bigbird16 = (BigBirdSparsityConfig(HEADS, block=n, different_layout_per_head=True) for n in (64, 16))
    return {
        "eager, learned bias": eager,
        BASELINE: lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.matrix()),
        "SDPA, frozen bias": with_frozen_bias,
        "SDPA, no bias": lambda x: sdpa(x.q, x.k, x.v),
        "ours: dense, no bias": ours(None, bias=False),
        "ours: dense, learned bias": ours(None),
        "ours: BigBird, block 64": ours(bigbird64),
        "ours: BigBird, block 16": ours(bigbird16),
        "ours: Longformer, block 64": ours(BSLongformerSparsityConfig(HEADS, block=64)),
    }


def one_pass(call: Callable[[Inputs], Tensor], x: Inputs, grad: Tensor) -> float:
    """Milliseconds of CPU time."""
    begin = time.process_time()
    call(x).backward(grad)
    took = (time.process_time() - begin) * 1e3
    for leaf in (x.q, x.k, x.v, x.weight):
        leaf.grad = None
    return took


def measure(args: argparse.Namespace, length: int, dtype: torch.dtype, slow: set[str]) -> dict[str, list[float]]:
    """Milliseconds of args.rounds passes of each contender; of one that is found to be `slow`, of the first pass."""
    gib = HEADS * length**2 * 4 / 2**30
    calls = {n: c for n, c in contenders().items() if MATRICES.get(n, 0) * gib <= args.limit and n not in slow}
    inputs = {name: make_inputs(length, dtype) for name in calls}
    grad = torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(1 + args.rounds):
        for name, call in calls.items():
            if name in slow:
                continue
            took = one_pass(call, inputs[name], grad)
            if number == 0 and took > args.slowest * 1e3:
                slow.add(name)
            if number > 0 or name in slow:
                times[name].append(took)
    return times


def peak_memory(name: str, length: int, dtype: torch.dtype) -> float:
    """MiB by which one pass raises the resident set of a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(_peak_memory, name, length, dtype).result()


def _peak_memory(name: str, length: int, dtype: torch.dtype) -> float:
    call, small, x = contenders()[name], make_inputs(128, dtype), make_inputs(length, dtype)
    one_pass(call, small, torch.ones_like(small.q))
    grad = torch.randn_like(x.q)
    for leaf in (x.q, x.k, x.v):
        leaf.grad = torch.zeros_like(leaf)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _resident("VmRSS")
    call(x).backward(grad)
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def rows_of(args: argparse.Namespace, length: int, dtype: torch.dtype, slow: set[str]) -> list[str]:
    """Lines of the table for one length and dtype; contenders too slow for a longer one are added to `slow`."""
    times, lines = measure(args, length, dtype, slow), []
    operations = 14 * HEADS * length**2 * HEAD_DIM  # two products forward, five backward, of the dense matrix
    for name, values in times.items():
        median = statistics.median(values)
        ratio = "-"
        if BASELINE in times:
            ratio = f"{statistics.median(b / a for a, b in zip(values, times[BASELINE], strict=False)):.2f}"
        spread = "one pass" if len(values) == 1 else f"{(max(values) - min(values)) / median:.0%}"
        lines.append(
            f"| {length} | {str(dtype).removeprefix('torch.')} | {name} | {median:.4g} | {spread} | {ratio} "
            f"| {operations / median / 1e9:.4g} | {peak_memory(name, length, dtype):.0f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slowest", type=float, default=2.5, help="seconds")
    parser.add_argument("--limit", type=float, default=8.0, help="GiB of score matrices")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    lines = []
    for name in args.dtypes:
        slow: set[str] = set()
        for length in sorted(args.lengths):
            lines += rows_of(args, length, getattr(torch, name), slow)
            args.output.write_text(
                f"# Attention\n\n`OMP_NUM_THREADS=1 {' '.join(['python', *sys.argv])}`\n\n"
                f"Forward and backward, {HEADS} heads of {HEAD_DIM}, batch 1; torch {torch.__version__}; "
                f"{torch.get_num_threads()} thread(s); medians of {args.rounds} interleaved rounds. The spread is "
                f"(slowest - fastest) / median; the ratio is the time of {BASELINE} over this row's; TFLOP/s count "
                "the dense matrix; memory is what a pass adds.\n\n"
                "| length | dtype | | ms | spread | ratio | TFLOP/s | MiB |\n|---|---|---|---|---|---|---|---|\n"
                + "\n".join([*lines, ""])
            )


if __name__ == "__main__":
    main()
