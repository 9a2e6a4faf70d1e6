"""One attention call under many settings, compared with the dense float64 reference: for all backends and devices.

As a script it runs cases in Triton's interpreter, which has to be chosen before triton is imported:

    TRITON_INTERPRET=1 python -m tests.helpers.attention_cases '[{"layout": "bigbird", "padding": true}]'
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_experiments_tools.attention import AlibiBias, Layout, T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels.layout_cache import num_blocks
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig, BSLongformerSparsityConfig
from tests.helpers.attention_reference import attention_probabilities


@dataclass(frozen=True)
class Case:
    """Settings of a call."""

    layout: str = "random"  # "random" and "shared" are for any lengths, "bigbird" and "longformer" for equal ones
    block: int = 16
    query_length: int = 70
    key_length: int = 70
    bias: str = "t5"
    padding: bool = False
    causal: bool = False
    segments: bool = False
    dropout_p: float = 0.0
    batch: int = 2
    heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    compiled: bool = False  # by torch.compile


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Random leaves that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [x.to(dtype).requires_grad_() for x in drawn]


def make_layout(case: Case) -> object:
    if case.layout == "dense":
        return None
    if case.layout == "bigbird":
        return BigBirdSparsityConfig(case.heads, block=case.block, different_layout_per_head=True, seed=3)
    if case.layout == "longformer":
        return BSLongformerSparsityConfig(case.heads, block=case.block)
    generator = torch.Generator().manual_seed(0)
    heads = 1 if case.layout == "shared" else case.heads
    shape = heads, num_blocks(case.query_length, case.block), num_blocks(case.key_length, case.block)
    return Layout(torch.rand(shape, generator=generator) < 0.5, case.block)


def make_bias(case: Case, leaf: Tensor | None) -> object:
    if case.bias in ("t5", "t5 decoder"):  # few buckets, so that short inputs reach beyond the last
        return T5Bias(leaf, bidirectional=case.bias == "t5", num_buckets=8, max_distance=20)
    if case.bias == "t5 wide":  # more distances than the Triton kernels sum at a time
        return T5Bias(leaf, num_buckets=32, max_distance=600)
    return AlibiBias(leaf) if case.bias == "alibi" else leaf


def make_leaf(case: Case, draw: object) -> Tensor | None:
    if case.bias in ("t5", "t5 decoder"):
        return draw(8, case.heads)
    if case.bias == "t5 wide":
        return draw(32, case.heads)
    if case.bias == "alibi":  # as small as real slopes: scores of hundreds leave float32 no digits for their gradient
        return (0.1 * draw(case.heads).detach()).requires_grad_()
    return draw(1, case.heads, case.query_length, case.key_length) if case.bias == "matrix" else None


def masks(case: Case, device: str) -> dict[str, object]:
    """Keyword arguments; the last row of the batch has no keys at all if there is padding."""
    generator = torch.Generator().manual_seed(1)
    padding, segments = None, None
    if case.padding:
        padding = torch.rand(case.batch, case.key_length, generator=generator) < 0.7
        padding[-1] = False
        padding = padding.to(device)
    if case.segments:
        lengths = case.query_length, case.key_length
        segments = tuple(
            torch.randint(0, 3, (case.batch, n), generator=generator).sort()[0].to(device) for n in lengths
        )
    return {"key_padding_mask": padding, "segment_ids": segments, "causal": case.causal, "scale": 0.4}


def errors(case: Case, backend: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, float]:
    """Largest relative error of the output and of each gradient."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(device, dtype).requires_grad_()

    q = draw(case.batch, case.heads, case.query_length, case.head_dim)
    k = draw(case.batch, case.heads, case.key_length, case.head_dim)
    v = draw(case.batch, case.heads, case.key_length, case.value_dim)
    leaf = make_leaf(case, draw)
    layout, keywords = make_layout(case), masks(case, device)
    attention = block_sparse_attention
    if case.compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")

    def call(values: Tensor) -> Tensor:
        torch.manual_seed(5)
        bias = make_bias(case, leaf)
        return attention(q, k, values, layout, bias, **keywords, dropout_p=case.dropout_p, backend=backend)

    dropout_mask = 1.0
    if case.dropout_p:  # values that are the identity show the weights, and so which of them were dropped
        identity = torch.eye(case.key_length, dtype=dtype, device=device).expand(*k.shape[:2], -1, -1)
        kept = (call(identity).detach() != 0).double()
        dropout_mask = kept / (1 - case.dropout_p)
    output = call(v)
    leaves = [q, k, v] if leaf is None else [q, k, v, leaf]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    bias = make_bias(case, exact[3] if leaf is not None else None)
    expected = attention_probabilities(*exact[:2], layout, bias, **keywords) * dropout_mask @ exact[2]
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(device, dtype)
    found = [output, *torch.autograd.grad(output, leaves, grad)]
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    names = ["output", "dq", "dk", "dv", "dbias"]
    return {
        name: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-2)).item()
        for name, a, b in zip(names, found, wanted, strict=False)
    }


def main() -> None:
    for settings in json.loads(sys.argv[1]):
        begin = time.process_time()
        found = errors(Case(**settings), "triton", torch.float32)
        print(json.dumps({"seconds": time.process_time() - begin, **found}), flush=True)


if __name__ == "__main__":
    main()
