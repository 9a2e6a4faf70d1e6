"""Attention with a T5 bias on a GPU, for benchmarks/gpu.py: exactness, time and memory of each backend, and tiles.

Times are those of the GPU: passes are queued behind a sleeping kernel, so that Python's share does not show. Python's
time for queuing a pass is reported separately.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_trace import by_kind, kernels_in, profiler_of
from step import environment_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from lm_experiments_tools.attention import AttentionSpec, T5Bias, attend, block_sparse_attention
from lm_experiments_tools.attention.kernels import tiles
from lm_experiments_tools.attention.kernels import triton as triton_backend
from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from lm_experiments_tools.modules.devices import synchronize

Emit = Callable[[dict[str, Any]], None]
HEADS, HEAD_DIM, TOKENS = 12, 64, 16384  # of t5-base; tokens of a batch
DROPOUT = 0.1
_SLEEP = 1 << 26  # clocks of the sleeping kernel, about 35 ms
_SECONDS, _FEWEST, _MOST = 0.15, 3, 20  # passes of a round
_SLOW_MS = 300  # a pass that takes longer is timed once
ROUNDS = 3


class Inputs(NamedTuple):
    """Leaves of a call: q, k, v [batch, heads, length, head_dim], the weight of a T5 bias [32, heads], its matrix."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    matrix: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.weight]


Call = Callable[[Inputs], Tensor]


def dtype_of(device: str) -> torch.dtype:
    """bf16, but float32 on a CPU: products of bf16 are wrong in Triton's interpreter."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def make_inputs(batch: int, heads: int, length: int, device: str) -> Inputs:
    torch.manual_seed(0)
    shape = batch, heads, length, HEAD_DIM
    dtype = dtype_of(device)
    drawn = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    weight = torch.randn(32, heads, device=device)
    matrix = dense_bias(T5Bias(weight), length, length, dtype).detach()
    return Inputs(*drawn, weight.requires_grad_(), matrix.requires_grad_())


def layout_of(name: str, heads: int) -> BigBirdSparsityConfig | None:
    return None if name == "dense" else BigBirdSparsityConfig(heads, block=64, different_layout_per_head=True)


def ours(backend: str, layout: object, dropout_p: float = 0.0, bias: bool = True) -> Call:
    return lambda x: block_sparse_attention(
        x.q, x.k, x.v, layout, T5Bias(x.weight) if bias else None, dropout_p=dropout_p, backend=backend
    )


def contenders(layout_name: str, heads: int) -> dict[str, tuple[Call, float, bool]]:
    """Name -> (call, dropout, whether the bias is trained through its weight)."""
    layout, found = layout_of(layout_name, heads), {}
    found["triton"] = ours("triton", layout), 0.0, True
    found["triton, dropout"] = ours("triton", layout, DROPOUT), DROPOUT, True
    found["sdpa"] = ours("sdpa", layout), 0.0, True
    found["sdpa, dropout"] = ours("sdpa", layout, DROPOUT), DROPOUT, True
    if layout is None:
        found["sdpa, one matrix for all layers"] = (lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.matrix)), 0.0, False
        found["sdpa, no bias"] = (lambda x: sdpa(x.q, x.k, x.v)), 0.0, False
    found["triton, no bias"] = ours("triton", layout, bias=False), 0.0, False
    return found


def errors(call: Call, dropout_p: float, layout_name: str, length: int, device: str) -> tuple[float, float]:
    """(error of the output, largest error of a gradient) against float64, relative to the largest value."""
    x, layout = make_inputs(1, 2, length, device), layout_of(layout_name, 2)
    dropout_mask: Tensor | float = 1.0
    if dropout_p:  # columns of the identity as values show which weights were dropped
        eye, kept = torch.eye(length, device=device, dtype=x.q.dtype), []
        for columns in eye.split(HEAD_DIM, dim=1):
            torch.manual_seed(1)
            values = columns.expand(1, 2, -1, -1).contiguous()
            kept.append(call(x._replace(v=values)).detach() != 0)
        dropout_mask = torch.cat(kept, -1) / (1 - dropout_p)
    torch.manual_seed(1)
    output = call(x)
    grad = torch.randn_like(output)
    exact = [leaf.detach().double().requires_grad_() for leaf in x.leaves]
    spec = AttentionSpec(layout=layout, bias=T5Bias(exact[3]))
    weights = attend(exact[0], exact[1], exact[2], spec, output_attentions=True)[1]
    expected = weights * dropout_mask @ exact[2]
    found = [output, *torch.autograd.grad(output, x.leaves, grad)]
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    relative = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]
    return relative[0], max(relative[1:])


def one_pass(call: Call, x: Inputs, grad: Tensor) -> None:
    """Forward and backward."""
    call(x).backward(grad)
    for leaf in x:
        leaf.grad = None


def timed(call: Callable[[], None], device: str, passes: int) -> tuple[float, float]:
    """(milliseconds of a pass on the device, milliseconds in which Python queues one)."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(passes):
            call()
        took = (time.perf_counter() - started) * 1e3 / passes
        return took, took
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SLEEP)
    begin.record()
    started = time.perf_counter()
    for _ in range(passes):
        call()
    queued = (time.perf_counter() - started) * 1e3 / passes
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / passes, queued


def attention(settings: dict[str, Any], emit: Emit) -> None:
    """Interleaved times of all backends at one length and layout; their exactness in a case that measures no time."""
    device, length, layout_name = settings["device"], settings["length"], settings["layout"]
    batch, heads = max(1, (TOKENS if device == "cuda" else length) // length), HEADS if device == "cuda" else 2
    found, x = contenders(layout_name, heads), make_inputs(batch, heads, length, device)
    small = contenders(layout_name, 2)
    grad, running = torch.randn_like(x.q), {}
    for name, (call, dropout_p, trains) in found.items():
        if name in settings["skip"]:
            continue
        emit({"begin": name})
        is_checked = settings.get("warm") or device == "cpu"
        if is_checked and trains:
            output, gradients = errors(small[name][0], dropout_p, layout_name, length, device)
            emit({"name": name, "output_error": output, "gradient_error": gradients})
        if not settings.get("warm") or name.startswith("triton"):
            one_pass(call, x, grad)
        running[name] = call
    if not settings.get("warm"):
        _time_all(running, x, grad, settings, emit)


def _time_all(running: dict[str, Call], x: Inputs, grad: Tensor, settings: dict[str, Any], emit: Emit) -> None:
    device, (batch, heads, length, head_dim) = settings["device"], x.q.shape
    memory, passes, times = {}, {}, {}
    for name, call in running.items():
        emit({"begin": name})
        if device == "cuda":
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        times[name] = [timed(lambda call=call: one_pass(call, x, grad), device, 1)]
        took = times[name][0][0]
        passes[name] = min(max(int(_SECONDS * 1e3 / took), _FEWEST), _MOST) if device == "cuda" else 1
        memory[name] = (torch.cuda.max_memory_allocated() - held) / 2**20 if device == "cuda" else None
    fast = {name: call for name, call in running.items() if times[name][0][0] < _SLOW_MS}
    times |= {name: [] for name in fast}
    for _ in range(ROUNDS if device == "cuda" else 1):
        for name, call in fast.items():
            emit({"begin": name})
            times[name].append(timed(lambda call=call: one_pass(call, x, grad), device, passes[name]))
    # Two products forward and five backward, of the dense matrix, whatever the layout skips.
    operations = 14 * batch * heads * length**2 * head_dim
    for name, turns in times.items():
        median, host = (statistics.median(column) for column in zip(*turns, strict=True))
        spread = (max(turns)[0] - min(turns)[0]) / median
        emit({"name": name, "ms": median, "spread": spread, "host_ms": host, "tflops": operations / median / 1e9,
              "mib": memory[name]})  # fmt: skip


# ---- the Triton kernels one by one ----------------------------------------------------------------------------------
KERNEL_CALLS = (  # batch, length, with a bias, causal: the encoder's, BERT's, a long one, the decoder's
    (128, 512, True, False), (128, 512, False, False), (8, 2048, True, False), (128, 114, True, True),
)  # fmt: skip
PASSES = 12  # of a trace


def kernel_times(device: str) -> Iterator[dict[str, Any]]:
    """Rows: milliseconds of each Triton kernel of a call whose q, k and v are views of one product, as a model's."""
    for batch, length, has_bias, causal in KERNEL_CALLS:
        batch, heads, passes = (batch, HEADS, PASSES) if device == "cuda" else (1, 2, 1)
        length = length if device == "cuda" else 32
        torch.manual_seed(0)
        x = torch.randn(batch, length, 3, heads, HEAD_DIM, device=device, dtype=dtype_of(device)).requires_grad_()
        bias = T5Bias(torch.randn(32, heads, device=device).requires_grad_(), not causal) if has_bias else None

        def one_pass(x: Tensor = x, bias: T5Bias | None = bias, causal: bool = causal) -> None:
            q, k, v = x.permute(2, 0, 3, 1, 4)
            output = block_sparse_attention(q, k, v, None, bias, causal=causal, scale=1.0, backend="triton")
            output.transpose(1, 2).flatten(2).sum().backward()

        for _ in range(2):  # compiles them
            one_pass()
        with profiler_of(device) as profiler:
            for _ in range(passes):
                one_pass()
            synchronize(torch.device(device))
        found = by_kind(kernels_in(profiler), passes)
        ms = {kind.removeprefix("attention, "): took for kind, (took, _) in found.items() if "attention, " in kind}
        total = sum(ms.values())
        rate = 14 * batch * heads * length**2 * HEAD_DIM / total / 1e9 if total else None
        name = f"{batch} x {length}{', bias' if has_bias else ''}{', causal' if causal else ''}"
        yield {"name": name, **ms, "ms": total, "tflops": rate}


def kernels(settings: dict[str, Any], emit: Emit) -> None:
    """Times of the kernels, of each tree in a process of its own."""
    for label, tree in settings["trees"].items():
        command = [sys.executable, __file__, settings["device"]]
        done = subprocess.run(command, env=environment_of(Path(tree)), capture_output=True, text=True)
        for row in map(json.loads, done.stdout.splitlines()):
            emit({**row, "name": f"{label}: {row['name']}"})
        if done.returncode:
            emit({"name": label, "error": done.stderr.strip().splitlines()[-1][:300]})


def cudnn_bias(settings: dict[str, Any], emit: Emit) -> None:
    """cuDNN's attention with a bias matrix [1, heads, 512, 512] and its gradient: near SDPA's rate it replaces ours.

    By NVIDIA/cudnn-frontend's test/python/test_mhas.py; never run yet.
    """
    import cudnn

    torch.manual_seed(0)
    x = make_inputs(128, HEADS, 512, "cuda")
    q, k, v, bias = (leaf.detach() for leaf in (x.q, x.k, x.v, x.matrix.contiguous()))
    o, do, dq, dk, dv, dbias = *(torch.empty_like(q) for _ in range(5)), torch.empty_like(bias)
    do.normal_()
    stats = torch.empty(*q.shape[:3], 1, device="cuda")
    kinds = {"io_data_type": cudnn.data_type.BFLOAT16, "intermediate_data_type": cudnn.data_type.FLOAT}
    graphs = []
    for is_backward in (False, True):
        graph = cudnn.pygraph(**kinds, compute_data_type=cudnn.data_type.FLOAT)
        given = {"q": q, "k": k, "v": v, "bias": bias}
        given |= {"o": o, "dO": do, "stats": stats, "dBias": dbias} if is_backward else {}
        named = {name: graph.tensor_like(tensor) for name, tensor in given.items()}
        if is_backward:
            found = graph.sdpa_backward(name="backward", attn_scale=1.0, **named)
        else:
            found = graph.sdpa(name="forward", attn_scale=1.0, generate_stats=True, **named)
        written = (dq, dk, dv) if is_backward else (o, stats)
        for node, tensor in zip(found, written, strict=True):
            node.set_output(True).set_dim(tensor.size()).set_stride(tensor.stride())
            if tensor is stats:
                node.set_data_type(cudnn.data_type.FLOAT)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        pack = {named[name]: tensor for name, tensor in given.items()} | dict(zip(found, written, strict=True))
        graphs.append((graph, pack, torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)))
    for name, (graph, pack, workspace) in zip(("forward", "backward with dBias"), graphs, strict=True):
        times = [timed(lambda g=graph, p=pack, w=workspace: g.execute(p, w), "cuda", 10)[0] for _ in range(4)][1:]
        ms = statistics.median(times)
        operations = (10 if "back" in name else 4) * q.numel() * q.shape[2]
        emit({"name": name, "ms": ms, "tflops": operations / ms / 1e9})
    exact = [leaf.float().requires_grad_() for leaf in (q, k, v, bias)]
    weights = (exact[0] @ exact[1].transpose(-1, -2) + exact[3]).softmax(-1)
    expected = torch.autograd.grad(weights @ exact[2], exact, do.float())
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip((dq, dk, dv, dbias), expected, strict=True)]
    emit({"name": "backward with dBias", "gradient_error": max(errors)})


# ---- tiles of the Triton kernels ------------------------------------------------------------------------------------
# queries, keys, warps, stages; for 16-bit inputs of head dimension 64
CANDIDATES = [tiles.Tile(*sizes) for sizes in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))]


def _table(device: str) -> dict[tuple[str, int], tiles.Tile]:
    """The measured tiles of this card, as `tiles.MEASURED` has them; kernels take them from there."""
    card = triton_backend.card_of(torch.device(device, 0))
    return tiles.MEASURED.setdefault((card.capability, 2), {}) if card else tiles.TILES


def _named(settings: dict[str, Any]) -> list[tuple[str, tiles.Tile, str]]:
    """(kernel, tile, name) of candidates that have not failed, as those that need too much shared memory do."""
    candidates = CANDIDATES if settings["device"] == "cuda" else CANDIDATES[:2]
    every = itertools.product(settings["kernels"], candidates)
    named = [(kernel, tile, f"{kernel} {tuple(tile)}") for kernel, tile in every]
    return [candidate for candidate in named if candidate[2] not in settings["skip"]]


def tile_compile(settings: dict[str, Any], emit: Emit) -> None:
    """Run a part of the candidates once, which compiles them."""
    device, call = settings["device"], ours("triton", None)
    table = _table(device)
    known = dict(table)
    for kernel, tile, name in itertools.islice(_named(settings), settings["shard"], None, settings["shards"]):
        emit({"begin": name})
        x = make_inputs(1, 2, settings["lengths"][0], device)
        table[kernel, HEAD_DIM] = tile
        one_pass(call, x, torch.ones_like(x.q))
        synchronize(torch.device(device))
        table.update(known)


def tile_search(settings: dict[str, Any], emit: Emit) -> None:
    """The fastest candidate of each kernel, one kernel after the other, by the product of times at two lengths."""
    device, call, scores = settings["device"], ours("triton", None), {}
    table, tokens, heads = _table(device), *((TOKENS, HEADS) if device == "cuda" else (1, 2))
    inputs = [make_inputs(max(1, tokens // length), heads, length, device) for length in settings["lengths"]]
    for kernel, candidates in itertools.groupby(_named(settings), key=lambda candidate: candidate[0]):
        scores.clear()
        for _, tile, name in candidates:
            emit({"begin": name})
            table[kernel, HEAD_DIM] = tile
            took = []
            for x in inputs:
                grad = torch.ones_like(x.q)
                one_pass(call, x, grad)
                passes, turns = (5, 5) if device == "cuda" else (1, 1)
                times = [timed(lambda x=x, grad=grad: one_pass(call, x, grad), device, passes) for _ in range(turns)]
                took.append(statistics.median(time for time, _ in times))
            emit({"name": name, "ms_short": took[0], "ms_long": took[1]})
            scores[tile] = took[0] * took[1]
        table[kernel, HEAD_DIM] = min(scores, key=scores.get)
    found = [(key, table[key, HEAD_DIM]) for key in settings["kernels"]]
    lines = "".join(f'        ("{kernel}", {HEAD_DIM}): Tile{tuple(tile)},\n' for kernel, tile in found)
    emit({"name": "measured", "paste": lines})


if __name__ == "__main__":
    for line in kernel_times(sys.argv[1]):
        print(json.dumps(line), flush=True)
