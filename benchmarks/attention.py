"""Forward and backward of attention with a T5 bias, next to what PyTorch offers. Writes benchmarks/attention.md.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

All contenders of a length take turns (A B C A B C ...), so that whatever else the machine does falls on all alike, and
ratios are medians of the ratios within a turn. Times are process CPU time of one forward and backward pass; peak
memory is what a pass adds to a process of its own that holds inputs and gradients already. A contender that takes
longer than --slowest gets one pass at that length and none at longer ones; one whose score matrices would not fit into
--limit is not run, and the table says so. Short inputs: benchmarks/attention_short.py. GPUs: benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from lm_experiments_tools.attention import T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels.bias import t5_bucket
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig, BSLongformerSparsityConfig

BASELINE = "SDPA, learned bias"
SHARED = "SDPA, learned bias of all layers"
MATRICES = {"eager, learned bias": 6, BASELINE: 6, SHARED: 6, "SDPA, frozen bias": 2}  # N x N tensors at once, about


@dataclass
class Inputs:
    """q, k, v [batch, heads, length, head_dim] and the weight of a T5 bias, all with gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    frozen: Tensor | None = None
    shared: Tensor | None = None

    def matrix(self) -> Tensor:
        """The bias as T5 implementations make it: buckets of all pairs, embedded."""
        position = torch.arange(self.q.shape[2], device=self.q.device)
        buckets = t5_bucket(position[None, :] - position[:, None], True, 32, 128)
        return self.weight[buckets].permute(2, 0, 1)[None].to(self.q.dtype)


def make_inputs(args: argparse.Namespace, length: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    batch = max(1, args.tokens // length)
    drawn = [torch.randn(batch, args.heads, length, args.head_dim, dtype=dtype) for _ in range(3)]
    weight = torch.randn(32, args.heads)
    return Inputs(*(x.requires_grad_() for x in (*drawn, weight)))


def eager(x: Inputs) -> Tensor:
    scores = x.q @ x.k.mT * x.q.shape[3] ** -0.5 + x.matrix()
    return scores.float().softmax(-1).to(x.q.dtype) @ x.v


def with_frozen_bias(x: Inputs) -> Tensor:
    if x.frozen is None:
        x.frozen = x.matrix().detach()
    return sdpa(x.q, x.k, x.v, attn_mask=x.frozen)


def with_shared_bias(x: Inputs) -> Tensor:
    """Cost of each layer of a T5: the matrix is made, and its gradient brought back to the weight, once for all."""
    if x.shared is None:
        x.shared = x.matrix().detach().requires_grad_()
    return sdpa(x.q, x.k, x.v, attn_mask=x.shared)


def ours(layout: object, bias: bool = True, backend: str = "auto") -> Callable[[Inputs], Tensor]:
    return lambda x: block_sparse_attention(x.q, x.k, x.v, layout, T5Bias(x.weight) if bias else None, backend=backend)


def contenders(args: argparse.Namespace) -> dict[str, Callable[[Inputs], Tensor]]:
    bigbird64, bigbird16 = (
        BigBirdSparsityConfig(args.heads, block=block, different_layout_per_head=True) for block in (64, 16)
    )
    longformer = BSLongformerSparsityConfig(args.heads, block=64)
    found = {
        "eager, learned bias": eager,
        BASELINE: lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.matrix()),
        SHARED: with_shared_bias,
        "SDPA, frozen bias": with_frozen_bias,
        "SDPA, no bias": lambda x: sdpa(x.q, x.k, x.v),
        "ours: dense, no bias": ours(None, bias=False),
        "ours: dense, learned bias": ours(None),
        "ours: BigBird, block 64": ours(bigbird64),
        "ours: BigBird, block 16": ours(bigbird16),
        "ours: Longformer, block 64": ours(longformer),
    }
    return found


def one_pass(call: Callable[[Inputs], Tensor], x: Inputs, grad: Tensor) -> None:
    call(x).backward(grad)
    for leaf in (x.q, x.k, x.v, x.weight, x.shared):
        if leaf is not None:
            leaf.grad = None


def timed(call: Callable[[], None]) -> float:
    """Milliseconds."""
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1e3


def matrices(args: argparse.Namespace, name: str, length: int) -> float:
    """GiB of the score matrices that a contender holds at once."""
    batch = max(1, args.tokens // length)
    return MATRICES.get(name, 0) * batch * args.heads * length**2 * 4 / 2**30


def measure(args: argparse.Namespace, length: int, dtype: torch.dtype, slow: set[str]) -> dict[str, list[float]]:
    """Milliseconds of each of args.rounds passes of each contender, or of the first of those that turn out `slow`."""
    calls = {
        name: call
        for name, call in contenders(args).items()
        if matrices(args, name, length) <= args.limit and name not in slow
    }
    inputs = {name: make_inputs(args, length, dtype) for name in calls}
    grad = torch.randn_like(next(iter(inputs.values())).q)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(args.warm_up + args.rounds):
        for name in sorted(calls.keys() - slow, key=list(calls).index):
            took = timed(lambda name=name: one_pass(calls[name], inputs[name], grad))
            if number == 0 and took > args.slowest * 1e3:
                slow.add(name)
                del inputs[name]
            if number >= args.warm_up or name in slow:
                times[name].append(took)
    return times


def peak_memory(args: argparse.Namespace, name: str, length: int, dtype: torch.dtype) -> float:
    """MiB that one pass adds."""
    context = multiprocessing.get_context("forkserver")  # its processes start with torch imported and nothing else
    context.set_forkserver_preload(["torch", "lm_experiments_tools.attention.kernels.gather"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(peak_on_cpu, args, name, length, dtype).result()


def peak_on_cpu(args: argparse.Namespace, name: str, length: int, dtype: torch.dtype) -> float:
    """The same on a CPU, in a process that does nothing else: how far resident memory rises (Linux), in MiB."""
    call = contenders(args)[name]
    small = make_inputs(args, 128, dtype)
    one_pass(call, small, torch.ones_like(small.q))
    x = make_inputs(args, length, dtype)
    grad = torch.randn_like(x.q)
    for leaf in (x.q, x.k, x.v):
        leaf.grad = torch.zeros_like(leaf)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident()["VmRSS"]
    call(x).backward(grad)
    return (resident()["VmHWM"] - before) / 1024


def resident() -> dict[str, int]:
    """KiB of this process in memory, now (VmRSS) and at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}


class Row(NamedTuple):
    """Measurements of one contender at one length."""

    length: int
    dtype: str
    name: str
    times: list[float]  # milliseconds
    memory: float  # MiB
    operations: int

    def over(self, other: Row) -> float:
        """This one's time over another's, the median of turns."""
        return statistics.median(a / b for a, b in zip(self.times, other.times, strict=False))

    def line(self, baseline: Row | None) -> str:
        if not self.times:
            return f"| {self.length} | {self.dtype} | {self.name} | does not fit | | | | {self.memory:.0f} |"
        median = statistics.median(self.times)
        spread = "one pass" if len(self.times) == 1 else f"{(max(self.times) - min(self.times)) / median:.0%}"
        return (
            f"| {self.length} | {self.dtype} | {self.name} | {median:.4g} | {spread} "
            f"| {'-' if baseline is None else f'{1 / self.over(baseline):.2f}'} "
            f"| {self.operations / median / 1e9:.4g} | {self.memory:.0f} |"
        )


Rows = dict[tuple[str, int, str], Row]  # by dtype, length and name


def rows_of(args: argparse.Namespace, length: int, dtype: torch.dtype, slow: set[str]) -> Rows:
    """Measures one length and dtype; contenders too slow for a longer one are added to `slow`."""
    times, short = measure(args, length, dtype, slow), str(dtype).removeprefix("torch.")
    batch = max(1, args.tokens // length)
    # Two products forward and five backward, of 2 * length^2 * head_dim operations each, whatever is skipped.
    operations = 14 * batch * args.heads * length**2 * args.head_dim
    found = {}
    for name in contenders(args):
        if matrices(args, name, length) > args.limit:
            found[short, length, name] = Row(length, short, name, [], matrices(args, name, length) * 1024, operations)
    for name, values in times.items():
        memory = peak_memory(args, name, length, dtype) if args.memory else math.nan
        found[short, length, name] = Row(length, short, name, values, memory, operations)
    for row in found.values():
        print(row.line(baseline_of(row, found)), flush=True)
    return found


def baseline_of(row: Row, rows: Rows) -> Row | None:
    """The row to compare with, if that has been measured."""
    baseline = rows.get((row.dtype, row.length, BASELINE))
    return baseline if baseline is not None and baseline.times else None


def verdicts(rows: Rows) -> list[str]:
    """Goals, and what was measured."""
    sparse, found = "ours: BigBird, block 64", []
    for dtype in dict.fromkeys(key[0] for key in rows):
        by_name = {
            name: {
                length: row
                for (kind, length, other), row in rows.items()
                if (kind, other) == (dtype, name) and row.times
            }
            for name in (sparse, BASELINE, "ours: dense, no bias", "SDPA, no bias", "ours: dense, learned bias")
        }
        if 2048 in by_name[sparse] and 2048 in by_name[BASELINE]:
            ratio = by_name[BASELINE][2048].over(by_name[sparse][2048])
            found.append(f"{dtype}: at 2048 tokens BigBird is {ratio:.1f} times as fast as {BASELINE} (goal: 10)")
        for mine, theirs in (("ours: dense, no bias", "SDPA, no bias"), ("ours: dense, learned bias", BASELINE)):
            pairs = {n: (row, by_name[theirs][n]) for n, row in by_name[mine].items() if n in by_name[theirs]}
            # one pass of each says nothing of five percent
            ratios = {n: a.over(b) for n, (a, b) in pairs.items() if min(len(a.times), len(b.times)) > 1}
            if ratios:
                worst = max(ratios, key=ratios.get)
                found.append(f"{dtype}: {mine}, takes {ratios[worst]:.2f} of {theirs} at worst, {worst} (goal: 1.05)")
        lengths = sorted(by_name[sparse])
        if len(lengths) > 1 and not math.isnan(by_name[sparse][lengths[0]].memory):
            grows = by_name[sparse][lengths[-1]].memory / by_name[sparse][lengths[0]].memory
            found.append(
                f"{dtype}: from {lengths[0]} to {lengths[-1]} tokens, {lengths[-1] / lengths[0]:g} times as many, the "
                f"memory of BigBird grows {grows:.1f} times (goal: linear)"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=1, help="passes before the rounds")
    parser.add_argument("--slowest", type=float, default=2.5, help="seconds")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1, help="of a batch, of one row at least")
    parser.add_argument("--limit", type=float, default=8.0, help="GiB of score matrices")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    rows: Rows = {}
    for name in args.dtypes:
        slow: set[str] = set()
        for length in sorted(args.lengths):
            rows |= rows_of(args, length, getattr(torch, name), slow)
            write_report(args, rows)


def write_report(args: argparse.Namespace, rows: Rows) -> None:
    where = f"CPU, {torch.get_num_threads()} thread(s)"
    command = " ".join(["python benchmarks/attention.py", *sys.argv[1:]])
    output = args.output or Path(__file__).with_suffix(".md")
    output.write_text(
        "# Attention\n\n"
        f"`OMP_NUM_THREADS=1 {command}`\n\n"
        f"Forward and backward, {args.heads} heads of {args.head_dim}, "
        f"batch 1; torch {torch.__version__}; {where}; medians "
        f"of {args.rounds} interleaved rounds, or one pass if that takes more than {args.slowest:g} s. The spread is "
        f"(slowest - fastest) / median; the ratio is the time of {BASELINE} over this row's; TFLOP/s count the dense "
        "matrix, whatever is skipped; memory is what a pass adds at its peak, or what would not fit into "
        f"{args.limit:g} GiB.\n\n"
        + "".join(f"- {verdict}\n" for verdict in verdicts(rows))
        + "\n| length | dtype | | ms | spread | ratio | TFLOP/s | MiB |\n|---|---|---|---|---|---|---|---|\n"
        + "".join(f"{row.line(baseline_of(row, rows))}\n" for row in rows.values())
    )


if __name__ == "__main__":
    main()
