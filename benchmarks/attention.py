"""Forward and backward of attention with a T5 bias, next to what PyTorch offers. Writes benchmarks/attention.md.

    OMP_NUM_THREADS=1 python benchmarks/attention.py
    python benchmarks/attention.py --device cuda
    python benchmarks/attention.py --device cuda --tune

All contenders of a length take turns (A B C A B C ...), so that whatever else the machine does falls on all alike.
Times are process CPU time (CUDA: events) of one forward and backward pass, medians; peak memory is what a pass adds to
a process of its own that holds inputs and gradients already (CUDA: of the allocator). A contender whose score matrices
would not fit into --limit is left out. --tune times tiles for the Triton kernels and prints triton_backend.TILES anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from lm_experiments_tools.attention import T5Bias, block_sparse_attention, triton_backend
from lm_experiments_tools.attention.bias import t5_bucket
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig, BSLongformerSparsityConfig

BASELINE = "SDPA, learned bias"
MATRICES = {"eager, learned bias": 6, BASELINE: 6, "SDPA, frozen bias": 2}  # N x N tensors held at once, about


@dataclass
class Inputs:
    """q, k, v [batch, heads, length, head_dim] and the weight of a T5 bias, all with gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    frozen: Tensor | None = None

    def matrix(self) -> Tensor:
        """The bias as T5 implementations make it: buckets of all pairs, embedded."""
        position = torch.arange(self.q.shape[2], device=self.q.device)
        buckets = t5_bucket(position[None, :] - position[:, None], True, 32, 128)
        return self.weight[buckets].permute(2, 0, 1)[None].to(self.q.dtype)


def make_inputs(args: argparse.Namespace, length: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    batch = max(1, args.tokens // length)
    drawn = [torch.randn(batch, args.heads, length, args.head_dim, device=args.device, dtype=dtype) for _ in range(3)]
    weight = torch.randn(32, args.heads, device=args.device)
    return Inputs(*(x.requires_grad_() for x in (*drawn, weight)))


def eager(x: Inputs) -> Tensor:
    scores = x.q @ x.k.mT * x.q.shape[3] ** -0.5 + x.matrix()
    return scores.float().softmax(-1).to(x.q.dtype) @ x.v


def with_frozen_bias(x: Inputs) -> Tensor:
    if x.frozen is None:
        x.frozen = x.matrix().detach()
    return sdpa(x.q, x.k, x.v, attn_mask=x.frozen)


def ours(layout: object, bias: bool = True, backend: str = "auto") -> Callable[[Inputs], Tensor]:
    return lambda x: block_sparse_attention(x.q, x.k, x.v, layout, T5Bias(x.weight) if bias else None, backend=backend)


def flex(layout: object | None) -> Callable[[Inputs], Tensor]:
    """FlexAttention with a learned bias looked up by distance, its layout given as 128-token blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, made = torch.compile(flex_attention, dynamic=False), {}

    def call(x: Inputs) -> Tensor:
        table = T5Bias(x.weight).table()
        reach, length = table.shape[1] // 2, x.q.shape[2]
        if layout is not None and length not in made:
            blocks = layout.make_layout(length).to(x.q.device) != 0
            made[length] = create_block_mask(
                lambda b, h, i, j: blocks[h, i // layout.block, j // layout.block], 1, blocks.shape[0], length, length
            )
        return attend(
            *(x.q, x.k, x.v),
            score_mod=lambda s, b, h, i, j: s + table[h, (j - i).clamp(-reach, reach) + reach],
            block_mask=made.get(length),
        )

    return call


def contenders(args: argparse.Namespace) -> dict[str, Callable[[Inputs], Tensor]]:
    bigbird64, bigbird16 = (
        BigBirdSparsityConfig(args.heads, block=block, different_layout_per_head=True) for block in (64, 16)
    )
    longformer = BSLongformerSparsityConfig(args.heads, block=64)
    found = {
        "eager, learned bias": eager,
        BASELINE: lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.matrix()),
        "SDPA, frozen bias": with_frozen_bias,
        "SDPA, no bias": lambda x: sdpa(x.q, x.k, x.v),
        "ours: dense, no bias": ours(None, bias=False),
        "ours: dense, learned bias": ours(None),
        "ours: BigBird, block 64": ours(bigbird64),
        "ours: BigBird, block 16": ours(bigbird16),
        "ours: Longformer, block 64": ours(longformer),
    }
    if args.device == "cuda":
        found |= {
            "our kernel: dense, no bias": ours(None, bias=False, backend="triton"),
            "FlexAttention: dense, learned bias": flex(None),
            "FlexAttention: BigBird, block 64, learned bias": flex(bigbird64),
        }
    return found


def one_pass(call: Callable[[Inputs], Tensor], x: Inputs, grad: Tensor) -> None:
    call(x).backward(grad)
    for leaf in (x.q, x.k, x.v, x.weight):
        leaf.grad = None


def timed(call: Callable[[], None], device: str) -> float:
    """Milliseconds."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1e3


def fits(args: argparse.Namespace, name: str, length: int) -> bool:
    batch = max(1, args.tokens // length)
    return MATRICES.get(name, 0) * batch * args.heads * length**2 * 4 <= args.limit * 2**30


def measure(args: argparse.Namespace, length: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Milliseconds of each of args.rounds passes of each contender, after two of warm-up."""
    calls = {name: call for name, call in contenders(args).items() if fits(args, name, length)}
    inputs = {name: make_inputs(args, length, dtype) for name in calls}
    grad = torch.randn_like(next(iter(inputs.values())).q)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(args.rounds + 2):
        for name, call in calls.items():
            took = timed(lambda call=call, x=inputs[name]: one_pass(call, x, grad), args.device)
            if number >= 2:
                times[name].append(took)
    return times


def peak_memory(args: argparse.Namespace, name: str, length: int, dtype: torch.dtype) -> float:
    """MiB that one pass adds."""
    if args.device == "cuda":
        x = make_inputs(args, length, dtype)
        grad = torch.randn_like(x.q)
        one_pass(contenders(args)[name], x, grad)
        x.frozen = None
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        one_pass(contenders(args)[name], x, grad)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    command = [sys.executable, __file__, "--peak", name, "--lengths", str(length), "--dtypes", str(dtype)[6:]]
    command += ["--heads", str(args.heads), "--head_dim", str(args.head_dim), "--tokens", str(args.tokens)]
    return json.loads(subprocess.run(command, check=True, text=True, capture_output=True).stdout)


def print_peak(args: argparse.Namespace) -> None:
    """The same on a CPU, in a process that does nothing else: how far resident memory rises (Linux), in MiB."""
    call, length, dtype = contenders(args)[args.peak], args.lengths[0], getattr(torch, args.dtypes[0])
    small = make_inputs(args, 128, dtype)
    one_pass(call, small, torch.ones_like(small.q))
    x = make_inputs(args, length, dtype)
    grad = torch.randn_like(x.q)
    for leaf in (x.q, x.k, x.v):
        leaf.grad = torch.zeros_like(leaf)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident()["VmRSS"]
    call(x).backward(grad)
    print((resident()["VmHWM"] - before) / 1024)


def resident() -> dict[str, int]:
    """KiB of this process in memory, now (VmRSS) and at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}


def table_of(args: argparse.Namespace, length: int, dtype: torch.dtype) -> list[str]:
    """Rows of the report for one length and dtype."""
    times = measure(args, length, dtype)
    medians = {name: statistics.median(values) for name, values in times.items()}
    batch = max(1, args.tokens // length)
    # Two products forward and five backward, of 2 * length^2 * head_dim operations each, whatever is skipped.
    operations = 14 * batch * args.heads * length**2 * args.head_dim
    rows = []
    for name, values in times.items():
        ratio = f"{medians[BASELINE] / medians[name]:.2f}" if BASELINE in medians else "-"
        spread = (max(values) - min(values)) / medians[name]
        memory = peak_memory(args, name, length, dtype) if args.memory else math.nan
        rows.append(
            f"| {length} | {str(dtype)[6:]} | {name} | {medians[name]:.4g} | {spread:.0%} | {ratio} "
            f"| {operations / medians[name] / 1e9:.4g} | {memory:.0f} |"
        )
        print(rows[-1], flush=True)
    return rows


def candidates(kernel: str) -> list[triton_backend.Tile]:
    sizes = [(64, 64)] if kernel == "bias_gradient" else itertools.product([64, 128], [32, 64, 128])
    return [triton_backend.Tile(*size, warps, stages) for size in sizes for warps in (4, 8) for stages in (1, 2, 3, 4)]


def tune(args: argparse.Namespace) -> None:
    """Replaces each entry of TILES by the fastest candidate, one kernel after the other, and prints the table."""
    call, dtype = ours(None, backend="triton"), getattr(torch, args.dtypes[0])
    x = make_inputs(args, args.lengths[0], dtype)
    grad = torch.randn_like(x.q)
    bound = next(limit for limit in (64, 128, 256) if args.head_dim <= limit)
    for kernel in ("forward", "query_gradient", "key_gradient", "bias_gradient"):
        found = {}
        for tile in candidates(kernel):
            triton_backend.TILES[kernel, bound] = tile
            try:
                one_pass(call, x, grad)
            except Exception as error:  # too much shared memory, or a compiler that gives up: not a candidate
                print(f"{kernel} {tuple(tile)}: {type(error).__name__}", flush=True)
                continue
            found[tile] = statistics.median(timed(lambda: one_pass(call, x, grad), args.device) for _ in range(9))
            print(f"{kernel} {tuple(tile)}: {found[tile]:.3f} ms", flush=True)
        triton_backend.TILES[kernel, bound] = min(found, key=found.get)
        print(f'    ("{kernel}", {bound}): {triton_backend.TILES[kernel, bound]},', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", help="default: float32 bfloat16, on a GPU bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, help="default: 8, on a GPU 12")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, help="of a batch; default: one row, on a GPU 16384 tokens")
    parser.add_argument("--limit", type=float, default=8.0, help="GiB of score matrices")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.dtypes = args.dtypes or (["bfloat16"] if on_gpu else ["float32", "bfloat16"])
    args.heads, args.tokens = args.heads or (12 if on_gpu else 8), args.tokens or (16384 if on_gpu else 1)
    if args.peak:
        return print_peak(args)
    if args.tune:
        return tune(args)

    rows = []
    for name in args.dtypes:
        for length in args.lengths:
            rows += table_of(args, length, getattr(torch, name))
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} thread(s)"
    output = args.output or Path(__file__).with_name("attention_gpu.md" if on_gpu else "attention.md")
    output.write_text(
        "# Attention\n\n"
        f"`{'' if on_gpu else 'OMP_NUM_THREADS=1 '}python benchmarks/attention.py {' '.join(sys.argv[1:])}`\n\n"
        f"Forward and backward, {args.heads} heads of {args.head_dim}, "
        f"{f'batches of {args.tokens} tokens' if on_gpu else 'batch 1'}; torch {torch.__version__}; {where}; medians "
        f"of {args.rounds} interleaved rounds. The spread is (slowest - fastest) / median; the ratio is the time of "
        f"{BASELINE} over this row's; TFLOP/s count the dense matrix, whatever is skipped; memory is what a pass adds "
        "at its peak.\n\n"
        "| length | dtype | | ms | spread | ratio | TFLOP/s | MiB |\n|---|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
