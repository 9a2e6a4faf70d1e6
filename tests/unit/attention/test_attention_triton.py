"""The Triton kernels: in the interpreter against float64, compiled for GPUs that are not here, and on one that is."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from lm_experiments_tools.attention import Layout, T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels import call
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig
from tests.helpers import ROOT
from tests.helpers.attention_cases import Case, errors
from tests.helpers.attention_reference import attention_probabilities

pytest.importorskip("triton", reason="triton is not installed")

# Two tiles of queries and four of keys at least, so that far, near and masked tiles all occur. Of the slow matrix's
# settings these meet the most: per-head lists, part-filled tiles, both masks; causal, dropout, a larger block, two
# lengths; dense with ALiBi; one token.
QUICK = [
    Case("bigbird", 16, 90, 90, padding=True, segments=True, head_dim=16, value_dim=16),
    Case("random", 64, 70, 130, "t5 decoder", causal=True, dropout_p=0.25, batch=1, head_dim=12, value_dim=20),
    Case("dense", 16, 70, 70, "alibi", causal=True, batch=1),
    Case("dense", 16, 1, 70, batch=1),
    Case("dense", 16, 40, 70, dropout_p=0.25, batch=1, compiled=True),
    Case("dense", 16, 130, 150, batch=1, heads=1),  # tiles of two distances in one list
]
MANY_TILES = [
    Case("dense", 16, 70, 300, "t5 wide", batch=1, heads=1),
    Case("random", 32, 300, 140, "t5 wide", segments=True, batch=1),
]
SLOW = [
    Case(
        layout, block, query_length, key_length, bias, padding, causal, segments, dropout_p, head_dim=16, value_dim=16
    )
    for (layout, query_length, key_length), block in itertools.product(
        [("bigbird", 150, 150), ("random", 150, 200), ("shared", 200, 150), ("dense", 130, 150)], [16, 32, 128]
    )
    for bias, padding, causal, segments, dropout_p in [
        ("t5", False, False, False, 0.0),
        ("t5", True, True, False, 0.25),
        ("t5 decoder", True, False, True, 0.0),
        ("alibi", False, True, True, 0.0),
        ("none", True, True, False, 0.25),
        ("none", False, False, False, 0.0),
    ]
]

LONG = pytest.mark.slow, pytest.mark.timeout(3600)


def printed(*command: str, **variables: str) -> list:
    """JSON lines that a Python process prints; by default its kernels run in Triton's interpreter."""
    variables = variables or {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "cases",
    [QUICK, *(pytest.param(cases, marks=LONG) for cases in (MANY_TILES, *(SLOW[i::6] for i in range(6))))],
    ids=["quick", "many tiles", *(f"matrix {i}" for i in range(6))],
)
def test_kernels_are_exact_in_the_interpreter(cases):
    command = "-m", "tests.helpers.attention_cases", json.dumps([asdict(case) for case in cases])
    for case, found in zip(cases, printed(*command), strict=True):
        found.pop("seconds")
        assert max(found.values()) < 1e-5, (case, found)


IN_THE_INTERPRETER = """
import json
import torch
from lm_experiments_tools.attention import AttentionSpec, T5Bias, attend, block_sparse_attention
from lm_experiments_tools.attention.kernels import tiles, triton_kernels

list_of, programs = triton_kernels.list_of, []
triton_kernels.list_of = lambda *arguments: programs.append(0) or list_of(*arguments)
q = torch.zeros(1, 4, 64, 16)
masks = []
for queries, keys in ((64, 64), (16, 32), (32, 16)):
    tiles.TILES["forward", 64] = tiles.Tile(2 * queries, 2 * keys, 4, 2)
    torch.manual_seed(0)
    output = block_sparse_attention(q, q, torch.eye(64).expand(1, 4, 64, 64), dropout_p=0.1, backend="triton")
    masks.append(output != 0)
assert len(programs) == 4 * (1 + 4 + 2)  # of 64, 16 and 32 queries: a tile that changes is taken at once
print(json.dumps([all(torch.equal(masks[0], mask) for mask in masks), 1 - masks[0].double().mean().item()]))

x = torch.randn(2, 40, 3, 2, 16, requires_grad=True)
q, k, v = x.permute(2, 0, 3, 1, 4)  # views of one product
bias = T5Bias(torch.randn(32, 2))
results = []
compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
for views, call, packed in (
    ((q, k, v), attend, None),
    ((q.contiguous(), k.contiguous(), v.contiguous()), attend, None),
    ((q, k, v), compiled, None),
    ((q, k, v), compiled, x.view(2, 40, 96)),
):
    output, _ = call(*views, AttentionSpec(bias=bias, packed=packed), "triton")
    results.append((output, torch.autograd.grad(output.transpose(1, 2).flatten(2).square().sum(), x)[0]))
assert results[0][0].transpose(1, 2).is_contiguous() and results[1][0].is_contiguous()
assert all(torch.equal(found, results[0][i]) for others in results[1:] for i, found in enumerate(others))
"""


@pytest.mark.slow
def test_dropout_does_not_depend_on_tiles_and_the_output_has_the_strides_of_q():
    [[same, share]] = printed("-c", IN_THE_INTERPRETER)
    assert same and abs(share - 0.1) < 5 * (0.1 * 0.9 / (4 * 64 * 64)) ** 0.5


IN_A_RECORDED_GRAPH = """
import json
import torch
from lm_experiments_tools.attention import T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels import call

x, weight = torch.randn(2, 2, 70, 16, requires_grad=True), torch.randn(8, 2, requires_grad=True)
seed = torch.zeros((), dtype=torch.int64)
call._new_seed = lambda device: seed

def run(device, of_dropout):
    seed.fill_(of_dropout)
    with torch.device(device):
        bias = T5Bias(weight, num_buckets=8, max_distance=20)
        output = block_sparse_attention(x, x, x, None, bias, dropout_p=0.5, backend="triton")
        return [output, *torch.autograd.grad(output.square().sum(), [x, weight])]

# Caches of the first call hold what it made with another default device.
first, again, other = run("meta", 1), run("cpu", 1), run("cpu", 2)
print(json.dumps([all(map(torch.equal, first, again)), any(map(torch.equal, first, other))]))
"""

WITHOUT_ITS_LAYOUT = """
import json
import torch
from lm_experiments_tools.attention import Layout, block_sparse_attention

def gradient(kept):
    layout = Layout(torch.eye(2)[None], 16)
    kept.append(layout)
    return torch.autograd.grad(block_sparse_attention(x, x, x, layout, backend="triton").square().sum(), x)[0]

def gradient_without():
    output = block_sparse_attention(x, x, x, Layout(torch.eye(2)[None], 16), backend="triton").square().sum()
    return torch.autograd.grad(output, x)[0]

x = torch.randn(1, 1, 32, 16, requires_grad=True)
print(json.dumps(torch.equal(gradient([]), gradient_without())))
"""


@pytest.mark.slow
def test_a_backward_pass_knows_a_layout_that_its_caller_has_dropped():
    assert printed("-c", WITHOUT_ITS_LAYOUT) == [True]


@pytest.mark.slow
def test_a_recorded_graph_may_set_the_default_device_and_change_the_seed():
    """PyTorch records CUDA graphs with the GPU as default device, and replays calls without Python."""
    assert printed("-c", IN_A_RECORDED_GRAPH) == [[True, False]]


COUNT_TILES = """
import json
import torch
from lm_experiments_tools.attention import T5Bias, block_sparse_attention
from lm_experiments_tools.attention.kernels import triton_kernels
from tests.helpers.attention_reference import attention_probabilities

tile_at, visited = triton_kernels.tile_at, []
triton_kernels.tile_at = lambda *arguments: visited.append(0) or tile_at(*arguments)

def count(causal, **masks):
    weight = torch.randn(8, 1, requires_grad=True)
    leaves = [*(torch.randn(1, 1, 256, 16, requires_grad=True) for _ in range(3)), weight]
    q, k, v, _ = leaves
    bias, counts = T5Bias(weight, num_buckets=8, max_distance=20), []
    output = block_sparse_attention(q, k, v, None, bias, causal=causal, **masks, backend="triton")
    counts.append(len(visited))
    expected = attention_probabilities(q, k, None, bias, causal=causal, **masks) @ v.double()
    gradients = [torch.autograd.grad(x.square().sum(), leaves) for x in (output, expected)]
    counts.append(len(visited) - counts[0])
    visited.clear()
    largest = max((a - b).abs().max() / b.abs().max() for a, b in zip(*gradients))
    return [*counts, max(largest, (output - expected).abs().max()).item()]

documents = torch.arange(1, 5).repeat_interleave(64)[None]
mask, after = torch.arange(256)[None] < 50, torch.where(torch.arange(256) < 192, documents, 0)
for masks in ({}, {"segment_ids": documents}, {"segment_ids": after}, {"key_padding_mask": mask}):
    print(json.dumps(count("segment_ids" not in masks and bool(masks), **masks)))
"""


def test_tiles_of_documents_that_do_not_meet_and_of_padding_are_skipped():
    """In a row of 256 tokens: one document, four, three and padding; and a causal one of 50 tokens and padding."""
    forward, backward, errors = zip(*printed("-c", COUNT_TILES), strict=True)
    assert max(errors) < 1e-5
    # Tiles of 64 queries by 32 keys, for dk and dv of 32 by 64.
    assert forward == (4 * 8, 4 * 2, 4 * 2, 4 * 2) and backward == (32 + 32, 8 + 8, 8 + 8, 8 + 8)


COMPILE = """
import json, sys
import torch
from tests.helpers.compiled_kernels import compiled, launches_of
from lm_experiments_tools.attention import Layout

capability, masked = json.loads(sys.argv[1])
settings = {}
if masked:
    layout = Layout(torch.rand(1, 32, 32) < 0.5, 16)
    settings = dict(layout=layout, head_dim=56)
for launch in launches_of(500 if masked else 512, masked=masked, **settings):
    kernel = compiled(launch, capability)
    found = {"name": launch.name, "shared": kernel.metadata.shared, "ptx": kernel.asm["ptx"]}
    print(json.dumps(found), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("capability", "shared_memory"), [(80, 163), (90, 227)])
def test_kernels_compile_for_a_gpu_without_atomics(capability, shared_memory, masked, tmp_path):
    """Triton brings its assembler along, so that this needs no GPU; what it cannot show is speed."""
    kernels = printed("-c", COMPILE, json.dumps([capability, masked]), TRITON_CACHE_DIR=str(tmp_path))
    assert len(kernels) == 3
    for kernel in kernels:
        assert not re.findall(r"\b(?:atom|red)\.", kernel["ptx"]), kernel["name"]
        assert re.search(r"\b(wgmma|mma)\.", kernel["ptx"]), kernel["name"]
        assert kernel["shared"] <= shared_memory * 1024, kernel["name"]


# On a GPU

BANDS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


dtypes = pytest.mark.parametrize("dtype", BANDS, ids=str)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("case", [SLOW[6 * number + number % 6] for number in range(12)], ids=str)
def test_kernels_are_exact_on_a_gpu(case, dtype):
    """Each layout, block size and setting once or twice: to compile the kernels takes longer than to run them."""
    found = errors(replace(case, head_dim=64, value_dim=64), "triton", dtype, "cuda")
    assert max(found.values()) < BANDS[dtype], (case, found)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_inputs_agree_with_the_reference_on_a_gpu(dtype, head_dim):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 1000, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    weight = torch.randn(32, 4, device="cuda", requires_grad=True)
    layout = BigBirdSparsityConfig(4, block=64, different_layout_per_head=True)
    mask = torch.arange(1000, device="cuda")[None] < torch.tensor([[1000], [600]], device="cuda")
    leaves = [q, k, v, weight]
    results = []
    output = block_sparse_attention(q, k, v, layout, T5Bias(weight), mask, backend="triton")
    expected = (attention_probabilities(q, k, layout, T5Bias(weight), mask) @ v.double()).to(dtype)
    for x in (output, expected):
        results.append([x, *torch.autograd.grad(x, leaves, torch.ones_like(x))])
    for found, expected in zip(*results, strict=True):
        assert ((found - expected).abs().max() / expected.abs().max()).item() < BANDS[dtype]


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal_bit_for_bit():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weight = torch.randn(32, 4, device="cuda", requires_grad=True)
    layout = BigBirdSparsityConfig(4, block=64)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        output = block_sparse_attention(q, k, v, layout, T5Bias(weight), dropout_p=0.1, backend="triton")
        return [output, *torch.autograd.grad(output.square().sum(), [q, k, v, weight])]

    runs = [run() for _ in range(5)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.gpu
def test_auto_on_a_gpu():
    q = torch.empty(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
    bias = T5Bias(torch.zeros(32, 4, device="cuda", requires_grad=True))

    def taken(q: torch.Tensor, **spec: object) -> str:
        return call.choose(call.validate(call.AttentionInputs(q, q, q, call.AttentionSpec(**spec))), "auto").__name__

    assert taken(q).endswith("sdpa") and taken(q.double(), bias=bias).endswith("sdpa")
    assert taken(q, bias=bias).endswith("triton")
    assert taken(q, layout=Layout(torch.eye(16)[None], 64)).endswith("triton")
