"""The Triton kernels of an attention call, compiled for a GPU that this machine need not have."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from lm_experiments_tools.attention import T5Bias
from lm_experiments_tools.attention.kernels import triton as backend
from lm_experiments_tools.attention.kernels import triton_kernels
from lm_experiments_tools.attention.kernels.call import AttentionInputs, AttentionSpec, validate

_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
          torch.uint8: "*u8", torch.bool: "*i1"}  # fmt: skip
_DIVISIBLE = [["tt.divisibility", 16]]


class Launch(NamedTuple):
    """A kernel that the backend would have launched."""

    name: str
    arguments: dict[str, object]


class _Recorder:
    def __init__(self, name: str, launches: list[Launch]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda **arguments: self.launches.append(Launch(self.name, arguments))


def launches_of(length: int, *, masked: bool, layout: object = None, head_dim: int = 64) -> list[Launch]:
    """Kernels of a forward and backward pass of one head in bf16; `masked` adds padding, segments and dropout."""
    q, k, v = (torch.randn(1, 1, length, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[0, -1] = False
    spec = AttentionSpec(
        key_padding_mask=mask if masked else None,
        segment_ids=torch.zeros(1, length, dtype=torch.int64) if masked else None,
        bias=T5Bias(torch.zeros(32, 1, requires_grad=True)),
        layout=layout,
        causal=masked,
        dropout_p=0.1 if masked else 0.0,
    )
    launches: list[Launch] = []
    kernels = {name: _Recorder(name, launches) for name in vars(triton_kernels) if name.endswith("_kernel")}
    with mock.patch.multiple(triton_kernels, **kernels):
        backend.attend(validate(AttentionInputs(q, k, v, spec)), torch.tensor(0)).sum().backward()
    return launches


def compiled(launch: Launch, capability: int) -> CompiledKernel:
    """The kernel for a GPU of this compute capability, specialized as a launch specializes it."""
    kernel = getattr(triton_kernels, launch.name)
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[position,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[position,] = _TYPES[value.dtype], _DIVISIBLE
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if not parameter.do_not_specialize and value % 16 == 0:
                attributes[position,] = _DIVISIBLE
    options = {name: launch.arguments[name] for name in ("num_warps", "num_stages")}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)
