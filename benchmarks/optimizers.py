"""Time of one optimizer step on the parameters of a T5, next to torch's fused AdamW. Writes benchmarks/optimizers.md.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py --preset t5-v1_1-small --rounds 15

Each optimizer and torch's fused AdamW step their own copies of the parameters in turn (A B A B ...), so that whatever
else the machine does falls on both alike; figures are process CPU time (CUDA: events), ratios are of the medians and,
in parentheses, of the fastest steps. Subnormal numbers are flushed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lm_experiments_tools.models.build import build_model, load_model_config, num_parameters
from lm_experiments_tools.optimizers import Adafactor, AdamWScale, Muon

BASELINE = "torch AdamW fused"


class LoopAdamWScale(torch.optim.Optimizer):
    """The rule of AdamWScale as one would write it from the formula: one elementwise operation after another."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                size = group["lr"] * (1 - 0.999 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
                size *= max(1e-3, (p.norm(2) / p.numel() ** 0.5).item())
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-6), value=-size)


def contenders() -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    from transformers.optimization import Adafactor as TransformersAdafactor

    options = {"scale_parameter": True, "relative_step": False}
    return {
        BASELINE: lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "AdamWScale (ours)": lambda p: AdamWScale(p, lr=1e-3),
        "AdamWScale, plain loop": lambda p: LoopAdamWScale(p, lr=1e-3),
        "Muon (ours), AdamWScale for the rest": lambda p: Muon(hidden_and_others(p), lr=1e-3),
        "torch AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        "Adafactor (ours)": lambda p: Adafactor(p, lr=1e-3, **options),
        "Adafactor, transformers": lambda p: TransformersAdafactor(p, lr=1e-3, **options),
    }


def hidden_and_others(parameters: list[Tensor]) -> list[dict]:
    """Groups for Muon by shape: embeddings and output layers have more rows than the widest layer, biases fewer."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for p in parameters:
        groups[p.ndim == 2 and 100 < p.shape[0] < 10_000].append(p)
    return [{"params": members, "is_hidden": is_hidden} for is_hidden, members in groups.items()]


def timed_step(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Milliseconds of one step."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    begin = time.process_time()
    optimizer.step()
    return (time.process_time() - begin) * 1e3


def measure(shapes: list[torch.Size], names: list[str], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each of `rounds` steps of the named optimizers, after two steps of warm-up; shared gradients."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, device=device) * 0.05 for shape in shapes]
    grads = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    optimizers = {}
    for name in names:
        parameters = [torch.nn.Parameter(value.clone()) for value in drawn]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizers[name] = contenders()[name](parameters)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name, optimizer in optimizers.items():
            took = timed_step(optimizer, device)
            if number >= 2:
                times[name].append(took)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="t5-v1_1-small")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()

    from transformers import T5ForConditionalGeneration

    torch.set_flush_denormal(True)
    device = torch.device(args.device)
    with torch.device("meta"):
        model = build_model(T5ForConditionalGeneration, load_model_config(args.preset), seed=0)
    shapes = [p.shape for p in model.parameters()]
    rows = []
    for name in list(contenders())[1:]:  # in pairs with the baseline, to hold two sets of moments at a time, not six
        times = measure(shapes, [BASELINE, name], args.rounds, device)
        base, own = times[BASELINE], times[name]
        median, fastest = statistics.median(own) / statistics.median(base), min(own) / min(base)
        rows.append(
            f"| {name} | {statistics.median(own):.0f} | {statistics.median(base):.0f} | {median:.2f} ({fastest:.2f}) |"
        )
        print(rows[-1], flush=True)
        gc.collect()

    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    threads = "OMP_NUM_THREADS=1 " if device.type == "cpu" else ""
    command = f"python benchmarks/optimizers.py --preset {args.preset} --rounds {args.rounds} --device {args.device}"
    args.output.write_text(
        "# Optimizer step\n\n"
        f"`{threads}{command}`\n\n"
        f"{args.preset}: {num_parameters(model).total:,} fp32 parameters in {len(shapes)} tensors; torch "
        f"{torch.__version__}; {where}; {args.rounds} interleaved rounds each.\n\n"
        "Milliseconds are medians (CPU: process CPU time); the ratio is of medians, in parentheses of the fastest.\n\n"
        f"| optimizer | ms | {BASELINE}, same run, ms | ratio |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    main()
