"""Attention with a T5 bias on a GPU, for benchmarks/gpu.py: exactness, time and memory of each backend, and tiles.

Times are those of the GPU: passes are queued behind a sleeping kernel, so that Python's share does not show. Python's
time for queuing a pass is reported separately.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from lm_experiments_tools.attention import AttentionSpec, T5Bias, attend, block_sparse_attention
from lm_experiments_tools.attention.kernels import tiles
from lm_experiments_tools.attention.kernels import triton as triton_backend
from lm_experiments_tools.attention.kernels.bias import dense_bias
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig

Emit = Callable[[dict[str, Any]], None]
HEADS, HEAD_DIM, TOKENS = 12, 64, 16384  # of t5-base; tokens of a batch
DROPOUT = 0.1
_SLEEP = 1 << 26  # clocks of the sleeping kernel, about 35 ms
_SECONDS, _FEWEST, _MOST = 0.15, 3, 20  # passes of a round
_SLOW_MS = 300  # a pass that takes longer is timed once
_COMPILED = "triton", "flex"
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


def make_inputs(batch: int, heads: int, length: int, device: str) -> Inputs:
    torch.manual_seed(0)
    shape = batch, heads, length, HEAD_DIM
    drawn = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    weight = torch.randn(32, heads, device=device)
    matrix = dense_bias(T5Bias(weight), length, length, torch.bfloat16).detach()
    return Inputs(*drawn, weight.requires_grad_(), matrix.requires_grad_())


def layout_of(name: str, heads: int) -> BigBirdSparsityConfig | None:
    return None if name == "dense" else BigBirdSparsityConfig(heads, block=64, different_layout_per_head=True)


def ours(backend: str, layout: object, dropout_p: float = 0.0, bias: bool = True) -> Call:
    return lambda x: block_sparse_attention(
        x.q, x.k, x.v, layout, T5Bias(x.weight) if bias else None, dropout_p=dropout_p, backend=backend
    )


def flex(layout: Any) -> Call:
    """FlexAttention with a trained bias, looked up by distance; the layout as a mask of 128-token blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, masks = torch.compile(flex_attention, dynamic=False), {}

    def call(x: Inputs) -> Tensor:
        table, length = T5Bias(x.weight).table(x.q.shape[2]), x.q.shape[2]
        reach = table.shape[1] // 2
        if layout is not None and length not in masks:
            blocks = layout.make_layout(length).to(x.q.device) != 0
            masks[length] = create_block_mask(
                lambda b, h, i, j: blocks[h, i // layout.block, j // layout.block], 1, blocks.shape[0], length, length,
                device=x.q.device,
            )  # fmt: skip
        return attend(
            x.q, x.k, x.v, block_mask=masks.get(length),
            score_mod=lambda s, b, h, i, j: s + table[h, (j - i).clamp(-reach, reach) + reach],
            kernel_options={"fwd_BLOCK_N": 64},  # the default tile and the looked-up bias exceed shared memory
        )  # fmt: skip

    return call


def contenders(layout_name: str, heads: int, tuned: bool = False) -> dict[str, tuple[Call, float, bool]]:
    """Name -> (call, dropout, whether the bias is trained through its weight)."""
    layout, found = layout_of(layout_name, heads), {}
    found["triton"] = ours("triton", layout), 0.0, True
    found["triton, dropout"] = ours("triton", layout, DROPOUT), DROPOUT, True
    if tuned:
        return found
    found["flex"] = flex(layout), 0.0, True
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
    if settings["tuned"] and not use_measured(settings):
        return emit({"name": "triton, measured tiles", "skipped": "there are no measured tiles yet"})
    batch, heads = max(1, (TOKENS if device == "cuda" else length) // length), HEADS if device == "cuda" else 2
    found, x = contenders(layout_name, heads, settings["tuned"]), make_inputs(batch, heads, length, device)
    small = contenders(layout_name, 2, settings["tuned"])
    grad, running = torch.randn_like(x.q), {}
    for name, (call, dropout_p, trains) in found.items():
        needs_cuda = device == "cpu" and name.startswith(("triton", "flex"))
        if needs_cuda:
            emit({"name": name, "skipped": "needs CUDA"})
        if needs_cuda or name in settings["skip"]:
            continue
        emit({"begin": name})
        is_checked = settings.get("warm") or device == "cpu"
        if is_checked and trains and (length <= 2048 or name.startswith(_COMPILED)):
            output, gradients = errors(small[name][0], dropout_p, layout_name, length, device)
            emit({"name": name, "output_error": output, "gradient_error": gradients})
        if not settings.get("warm") or name.startswith(_COMPILED):
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


# ---- tiles of the Triton kernels ------------------------------------------------------------------------------------
# queries, keys, warps, stages; for 16-bit inputs of head dimension 64
CANDIDATES = [tiles.Tile(*sizes) for sizes in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))]
TUNED_LENGTHS = 512, 2048


def _table() -> dict[tuple[str, int], tiles.Tile]:
    """The measured tiles of this card, as `tiles.MEASURED` has them; kernels take them from there."""
    return tiles.MEASURED.setdefault((triton_backend.card_of(torch.device("cuda", 0)).capability, 2), {})


def _named(settings: dict[str, Any]) -> list[tuple[str, tiles.Tile, str]]:
    """(kernel, tile, name) of candidates that have not failed, as those that need too much shared memory do."""
    every = itertools.product(tiles.KERNELS, CANDIDATES)
    named = [(kernel, tile, f"{kernel} {tuple(tile)}") for kernel, tile in every]
    return [candidate for candidate in named if candidate[2] not in settings["skip"]]


def tile_compile(settings: dict[str, Any], emit: Emit) -> None:
    """Run a part of the candidates once, which compiles them."""
    call, table = ours("triton", None), _table()
    for kernel, tile, name in itertools.islice(_named(settings), settings["shard"], None, settings["shards"]):
        emit({"begin": name})
        x = make_inputs(1, 2, TUNED_LENGTHS[0], "cuda")
        table[kernel, HEAD_DIM] = tile
        one_pass(call, x, torch.ones_like(x.q))
        torch.cuda.synchronize()
        del table[kernel, HEAD_DIM]


def tile_search(settings: dict[str, Any], emit: Emit) -> None:
    """The fastest candidate of each kernel, one kernel after the other, by the product of times at two lengths."""
    call, table = ours("triton", None), _table()
    inputs = [make_inputs(TOKENS // length, HEADS, length, "cuda") for length in TUNED_LENGTHS]
    for kernel, candidates in itertools.groupby(_named(settings), key=lambda candidate: candidate[0]):
        scores = {}
        for _, tile, name in candidates:
            emit({"begin": name})
            table[kernel, HEAD_DIM] = tile
            took = []
            for x in inputs:
                grad = torch.ones_like(x.q)
                one_pass(call, x, grad)
                turns = [timed(lambda x=x, grad=grad: one_pass(call, x, grad), "cuda", 5)[0] for _ in range(5)]
                took.append(statistics.median(turns))
            emit({"name": name, "ms_512": took[0], "ms_2048": took[1]})
            scores[tile] = took[0] * took[1]
        table[kernel, HEAD_DIM] = min(scores, key=scores.get)
    card = triton_backend.card_of(torch.device("cuda", 0)).capability
    lines = "".join(f'        ("{kernel}", {dim}): Tile{tuple(tile)},\n' for (kernel, dim), tile in table.items())
    emit({"name": "measured", "card": card, "tiles": [[*key, tuple(tile)] for key, tile in table.items()],
          "paste": f"    ({card}, 2): {{\n{lines}    }},"})  # fmt: skip


def use_measured(settings: dict[str, Any]) -> bool:
    """Let the kernels take the tiles that an earlier case measured on this card; False where there are none."""
    lines = Path(settings["output"], "results.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if row.get("name") == "measured"]
    if not found or list(triton_backend.card_of(torch.device("cuda", 0)).capability) != found[-1]["card"]:
        return False
    _table().update({(kernel, dim): tiles.Tile(*tile) for kernel, dim, tile in found[-1]["tiles"]})
    return True
