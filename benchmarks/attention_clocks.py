"""Issue clocks of the Triton kernels, counted without a GPU. Writes benchmarks/attention_clocks.md.

    python benchmarks/attention_clocks.py

Triton compiles for sm_90 and disassembles what it made on any machine. A tile of scores costs as many clocks as warps
issue instructions in the loop over tiles, over the four schedulers of a multiprocessor; a length costs its tiles, far
from and near the diagonal, times that. It shows how much work the kernels add to those without bias, not what waits
for memory or for the tensor cores: those are `benchmarks/attention.py --device cuda`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from lm_experiments_tools.attention import T5Bias
from lm_experiments_tools.attention.kernels import triton as backend
from lm_experiments_tools.attention.kernels import triton_kernels
from lm_experiments_tools.attention.kernels.plan import AnyLayout
from lm_experiments_tools.attention.kernels.request import Request, check

KERNELS = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
SCHEDULERS = 4  # of a multiprocessor, each issues an instruction of one warp a clock


class Launch(NamedTuple):
    """One kernel as the backend would have launched it."""

    name: str
    programs: int
    arguments: dict[str, object]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What the backend launches, none of which runs."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda **arguments: launches.append(Launch(self.name, grid[0], arguments))

    kernels = {name: getattr(triton_kernels, name) for name in KERNELS}
    for name in kernels:
        setattr(triton_kernels, name, Recorder(name))
    try:
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel)


def launches_of(
    length: int,
    *,
    bias: bool = True,
    padding: bool = False,
    segments: bool = False,
    causal: bool = False,
    dropout_p: float = 0.0,
    layout: AnyLayout = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Launch]:
    """The kernels of one forward and backward pass of one sequence with one head."""
    q, k, v = (torch.randn(1, 1, length, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[0, -1] = False
    request = Request(
        q, k, v, layout, T5Bias(torch.zeros(32, 1, requires_grad=True)) if bias else None, mask if padding else None,
        torch.zeros(1, length, dtype=torch.int64) if segments else None, causal, None, dropout_p,
    )  # fmt: skip
    with recorded() as launches:
        backend.attend(check(request), 0).sum().backward()
    return launches


def compiled(launch: Launch, capability: int) -> CompiledKernel:
    """A launch's kernel, compiled for a GPU of this compute capability, specialised as a launch specialises it."""
    kernel = getattr(triton_kernels, launch.name)
    signature, fixed, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], fixed[place,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[place,] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i64" if parameter.name == "seed" else "i32"
            if not parameter.do_not_specialize and value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    options = {name: launch.arguments[name] for name in ("num_warps", "num_stages")}
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def loops_of(cubin: bytes) -> list[list[str]]:
    """Instructions of each loop that holds a matrix product, in the order of the program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([_NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines, labels, found = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_[\w.]+):", line):
            labels[label[1]] = len(lines)
        if instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(instruction[1].strip())
    for last, instruction in enumerate(lines):
        jump = re.search(r"BRA(?:\.\w+)*\s+.*?`\((\.L_[\w.]+)\)", instruction)
        first = labels.get(jump[1], last + 1) if jump else last + 1
        if any(re.search(r"\bH(?:G)?MMA", one) for one in lines[first : last + 1]):
            found.append(lines[first : last + 1])
    return found


# Clocks of a tile far from and near the diagonal before near tiles were loaded, and dropout shared calls of Philox.
BEFORE = {
    "T5 bias": [(596, 1297), (718, 932), (862, 1238), (0, 687)],
    "T5 bias, padding": [(769, 1475), (976, 1172), (934, 1306), (0, 794)],
    "T5 bias, dropout": [(2705, 3383), (3084, 3302), (3292, 3654), (0, 1876)],
    "T5 bias, padding, dropout": [(2867, 3556), (3330, 3556), (3362, 3718), (0, 1988)],
    "no bias": [(593, 593), (554, 554), (782, 782)],
}
SETTINGS = {
    "no bias": {"bias": False},
    "T5 bias": {},
    "T5 bias, padding": {"padding": True},
    "T5 bias, dropout": {"dropout_p": 0.1},
    "T5 bias, padding, dropout": {"padding": True, "dropout_p": 0.1},
    "no bias, padding, dropout": {"bias": False, "padding": True, "dropout_p": 0.1},
}


def clocks_of(launches: list[Launch], capability: int) -> list[tuple[int, int]]:
    """(far, near) issue clocks of a tile, of each kernel."""
    found = []
    for launch in launches:
        loops = [
            round(len(loop) * launch.arguments["num_warps"] / SCHEDULERS)
            for loop in loops_of(compiled(launch, capability).asm["cubin"])
        ]
        found.append((0 if launch.name == "bias_gradient_kernel" else loops[0], loops[-1]))
        print(launch.name, found[-1], flush=True)
    return found


def tiles_of(launches: list[Launch]) -> list[tuple[int, int]]:
    """(far, near) tiles of each kernel; without a bias, no tile is near."""
    found = []
    for launch in launches:
        if launch.name == "bias_gradient_kernel":
            found.append((0, launch.arguments["tiles"].numel()))
            continue
        begin, near, after, end = launch.arguments["ranges"].sum((0, 1)).tolist()
        found.append((end - begin - after + near, after - near))
    return found


def total(clocks: list[tuple[int, int]], tiles: list[tuple[int, int]], part: slice) -> int:
    """Clocks of the kernels in a part of the list."""
    return sum(c[0] * t[0] + c[1] * t[1] for c, t in zip(clocks[part], tiles[part], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="compute capability times ten")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()

    clocks = {
        name: clocks_of(launches_of(args.lengths[0], **settings), args.capability)
        for name, settings in SETTINGS.items()
    }
    both, forward, backward = slice(None), slice(0, 1), slice(1, None)
    rows, tile_rows = [], []
    for name in SETTINGS:
        for when, known in (("before", BEFORE), ("now", clocks)):
            if name in known:
                cells = " | ".join(f"{far} / {near}" if far else str(near) for far, near in known[name])
                tile_rows.append(f"| {name} | {when} | {cells} |{' |' if len(known[name]) == 3 else ''}\n")
    for length in args.lengths:
        tiles = {bias: tiles_of(launches_of(length, bias=bias)) for bias in (False, True)}
        for name in SETTINGS:
            for when, known in (("before", BEFORE), ("now", clocks)):
                if name == "no bias" or name not in known:
                    continue
                cells = [
                    total(known[name], tiles["T5" in name], part) / total(known["no bias"], tiles[False], part)
                    for part in (forward, backward, both)
                ]
                rows.append(f"| {length} | {name} | {when} | {' | '.join(f'{cell:.2f}' for cell in cells)} |\n")
    args.output.write_text(
        f"# Issue clocks of attention\n\n`python benchmarks/attention_clocks.py`, triton {triton.__version__}, "
        f"sm_{args.capability}, bfloat16, head_dim 64, dense; padding is a mask of\none key.\n\n"
        + __doc__.partition("\n\n")[2].partition("\n\n")[2]
        + "\nClocks over those of the kernels without bias, padding and dropout of the same time:\n\n"
        "| length | | | forward | backward | both |\n|---|---|---|---|---|---|\n"
        + "".join(rows)
        + "\nClocks of a tile far from / near the diagonal (128 x 64 scores; of the bias gradient 64 x 64):\n\n"
        "| | | forward | gradient of q | of k and v | of the bias |\n|---|---|---|---|---|---|\n" + "".join(tile_rows)
    )


if __name__ == "__main__":
    main()
