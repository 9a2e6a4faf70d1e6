"""Drives a backend through the loop's order of calls on a tiny T5; run by test_backends.py in every kind of job.

    worker.py OUT RESUME_FROM SCENARIO...

Writes OUT/SCENARIO_RANK.json (numbers) and, where weights are compared, OUT/SCENARIO.safetensors from rank 0.
RESUME_FROM is "-" or the OUT of an earlier job, whose saved state the scenario `resumed` continues.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lm_experiments_tools.attention.kernels import bias as biases
from lm_experiments_tools.attention.kernels import call as functional
from lm_experiments_tools.backends import detect_backend, get_backend
from lm_experiments_tools.backends.backend import Backend, LocalBackend, PendingStep
from lm_experiments_tools.backends.precision import get_precision
from lm_experiments_tools.backends.process_groups import host_group
from lm_experiments_tools.backends.slices import SlicedTensor, full
from lm_experiments_tools.checkpoint.tree import load_tree, save_tree, slice_ranges
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.helpers.toys import RaggedPairs, tiny_t5

SLICES = 2  # the data of a step is cut for two workers, whoever they are; one worker takes both
BATCH, ACCUMULATION, STEPS, SAVED_AT, BROKEN = 4, 2, 12, 6, 4
ARGS = {"batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION, "clip_grad_norm": 1.0}
DATA = RaggedPairs(512)
SPARSE = {"block": 2, "num_sliding_window_blocks": 1}
BIGBIRD = {"sparse_config_cls": "BigBird", "sparse_attention": SPARSE}


def micro_batches(step: int, piece: int) -> list[dict[str, Tensor]]:
    """Micro-batches of one slice of a step: two, but every third step only one, and that one short."""
    first = (step * SLICES + piece) * BATCH * ACCUMULATION % len(DATA)
    if step % 3 == 2:
        return [DATA.batch(list(range(first, first + BATCH - 1)))]
    return [DATA.batch(list(range(first + i * BATCH, first + (i + 1) * BATCH))) for i in range(ACCUMULATION)]


def train_step(backend: Backend, step: int, *, broken: bool = False, **clip: float) -> dict[str, Any]:
    """One step; `broken` makes the loss of slice 1 infinite, so that gradients are non-finite on its worker alone."""
    pieces = [backend.rank % SLICES] if backend.world_size > 1 else list(range(SLICES))
    counts = float(backend.rank < SLICES)  # what others do again adds nothing
    mine = [(piece, batch) for piece in pieces for batch in micro_batches(step, piece)]
    tokens = sum((b["labels"] != -100).sum().item() for p in range(SLICES) for b in micro_batches(step, p))
    total = torch.zeros((), dtype=torch.float64)
    backend.model.train()
    for m, (piece, batch) in enumerate(mine):
        last = m == len(mine) - 1
        with backend.reduction.passes(last):
            with backend.autocast():
                loss = backend.model(**batch)["loss"] * (batch["labels"] != -100).sum() / tokens
            total += loss.detach().double().cpu() * counts
            scale = float("inf") if broken and piece == 1 else 1.0
            backend.backward(loss * scale * counts, last)
    norm, applied = backend.clip_and_step(**clip).result()
    return {"loss": backend.sum(total).item(), "norm": norm, "applied": applied}


def setup(backend: Backend, optimizer: str = "AdamW", model: nn.Module | None = None, **options: Any) -> nn.Module:
    """A model that is another one on each rank before the backend makes them one, and AdamW with an empty group."""
    model = tiny_t5(seed=backend.rank) if model is None else model
    options = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6, **options} if optimizer == "AdamW" else options
    groups = [{"params": []}] if optimizer == "AdamW" else []
    backend.setup(model, getattr(torch.optim, optimizer)([*groups, {"params": model.parameters()}], **options))
    return model


def bits(tree: Any) -> str:
    """Something equal if and only if two states are, bit for bit."""
    if isinstance(tree, Tensor):
        content = tree.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{tree.dtype}{list(tree.shape)}{hashlib.sha256(content).hexdigest()}"
    if isinstance(tree, SlicedTensor):
        return bits(vars(tree))
    if isinstance(tree, dict):
        return str({key: bits(value) for key, value in tree.items()})
    return str([bits(value) for value in tree]) if isinstance(tree, (list, tuple)) else repr(tree)


def save_optimizer(backend: Backend, stem: Path) -> Any:
    """Save the state of the optimizer as a checkpoint does, and return the full tree that is read back."""
    tree = backend.state.optimizer_state()
    ranges = backend.gather(slice_ranges(tree)) if backend.state.is_sharded else None
    if backend.is_main or backend.state.is_sharded:
        save_tree(stem, tree, rank=backend.rank, ranges=ranges)
    backend.gather(None)
    return tree_map_only(SlicedTensor, full, load_tree(stem)) if backend.is_main else None


def save_weights(backend: Backend, out: Path, name: str) -> None:
    state = backend.state.model_state()
    if backend.is_main:
        save_file({key: value.clone().contiguous() for key, value in state.items()}, out / f"{name}.safetensors")


def trained_for(steps: int, backend: Backend, out: Path, name: str) -> dict[str, Any]:
    """Steps clipped by norm, after which the weights are saved under `name`."""
    result = {"steps": [train_step(backend, step, max_norm=0.5) for step in range(steps)]}
    save_weights(backend, out, name)
    return result


def scenario_trained(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """AdamW steps with accumulation, clipping and ragged steps; the step BROKEN is broken on one worker."""
    model = setup(backend)
    result: dict[str, Any] = {"describe": str(backend), "wrapped": type(backend.model).__name__, "steps": []}
    for step in range(STEPS):
        before = bits([backend.state.model_state(), backend.state.optimizer_state()]) if step == BROKEN else None
        result["steps"].append(train_step(backend, step, broken=step == BROKEN, max_norm=0.5))
        if step == BROKEN:
            result["untouched"] = before == bits([backend.state.model_state(), backend.state.optimizer_state()])
        if step + 1 == SAVED_AT:
            save_weights(backend, out, "saved")
            save_optimizer(backend, out / "state")
    save_weights(backend, out, "trained")
    result["weights_norm"] = backend.state.weights_norm()
    result["unwraps"] = backend.unwrap() is model
    return result


def scenario_resumed(backend: Backend, out: Path, earlier: Path) -> dict[str, Any]:
    """The second half of `trained`, from what an earlier job saved."""
    setup(backend)
    backend.state.load_model_state(load_file(earlier / "saved.safetensors") if backend.is_main else None)
    tree = load_tree(earlier / "state") if backend.is_main or backend.state.is_sharded else None
    backend.state.load_optimizer_state(tree)
    again = save_optimizer(backend, out / "again")
    if backend.state.is_sharded:  # as from another program's checkpoint, which rank 0 alone reads
        backend.state.load_optimizer_state(tree_map_only(SlicedTensor, full, tree) if backend.is_main else None)
        assert bits(save_optimizer(backend, out / "sent")) == bits(again)
    if backend.is_main:
        tree = tree_map_only(SlicedTensor, full, tree)
        before, after = (bits(of["optimizer"]["state"]) for of in (tree, again))
        assert len(tree["optimizer"]["state"]) > 10 and before == after
    steps = [train_step(backend, step, max_norm=0.5) for step in range(SAVED_AT, STEPS)]
    save_weights(backend, out, "resumed")
    return {"steps": steps}


def scenario_talked(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    backend.gather(None)
    kept = torch.tensor([backend.rank + 1, 2**53 + 1], dtype=torch.int64)
    return {
        "rank": backend.rank,
        "world_size": backend.world_size,
        "name": backend.name,
        "int64": backend.sum(kept).tolist(),
        "float64": backend.sum(torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)).tolist(),
        "scalar": backend.sum(torch.tensor(backend.rank + 0.5, dtype=torch.float64)).item(),
        "argument_kept": kept.tolist() == [backend.rank + 1, 2**53 + 1],
        "gather": backend.gather({"rank": backend.rank, "text": "x" * (backend.rank * 100)}),
        "broadcast": backend.broadcast({"from": backend.rank}),
    }


def scenario_clipped(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """SGD, so that weights show the clipped gradient itself."""
    setup(backend, "SGD", lr=0.1)
    steps = [train_step(backend, step, max_value=1e-3) for step in range(3)]
    steps += [train_step(backend, step) for step in range(3, 5)]
    save_weights(backend, out, "clipped")
    return {"steps": steps}


def scenario_frozen(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """A model with frozen parts, whose gradients are clipped."""
    model = tiny_t5(seed=backend.rank)
    model.shared.requires_grad_(False)
    backend.setup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    steps = [train_step(backend, step) for step in range(2)]
    steps += [train_step(backend, step, max_norm=0.5) for step in range(2, 4)]
    save_weights(backend, out, "frozen")
    return {"steps": steps, "bits": bits(list(model.parameters())) if not backend.state.shards_weights else ""}


def scenario_sparse(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """Block-sparse attention of our T5: the learned bias of the first layer is used by all of them.

    It is a module's parameter: with layers sharded one by one, it is gone when the second layer adds it. Short inputs
    would take SDPA, so the sparse backend is forced.
    """
    from modeling_t5 import T5Config, T5ForConditionalGeneration

    functional.forced = "blocks"
    biases.SHORT = biases.SHORT_DENSE = 0
    model = tiny_t5(seed=backend.rank)
    own = T5ForConditionalGeneration(T5Config(**{**model.config.to_dict(), **BIGBIRD}))
    own.load_state_dict(model.state_dict())
    setup(backend, model=own)
    return trained_for(4, backend, out, "sparse")


def scenario_compiled(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """Two steps of a sparse T5 of our own as it is, and two with --compile: blocks are compiled, then sharded."""
    from torch._dynamo.utils import counters

    from lm_experiments_tools.models.speed import compile_blocks
    from modeling_t5 import T5Config, T5ForConditionalGeneration

    config = {**tiny_t5().config.to_dict(), **BIGBIRD, "num_layers": 1, "num_decoder_layers": 1}
    result = {}
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**config))
        if name == "compiled":
            compile_blocks(model, backend="aot_eager")  # the graphs of --compile, run as they are
        setup(backend, model=model)
        result[name] = [train_step(backend, step, max_norm=0.5) for step in range(2)]
    frames = counters["frames"]
    breaks = sum(counters["graph_break"].values())
    return {**result, "frames": frames["total"], "fell_back": frames["total"] - frames["ok"] + breaks}


def scenario_partial(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """A parameter without gradient, and one that only slice 1 uses."""
    torch.manual_seed(backend.rank)
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "sometimes": nn.Linear(3, 1), "never": nn.Linear(3, 1)})
    backend.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for _ in range(3):
        for m, piece in enumerate([backend.rank] if backend.world_size > 1 else range(SLICES)):
            last = backend.world_size > 1 or m == SLICES - 1
            with backend.reduction.passes(last):
                names = ["used", "sometimes"] if piece == 1 else ["used"]
                loss = sum(model[name](torch.full((2, 3), piece + 1.0)).sum() for name in names) / SLICES
                backend.backward(loss, last)
        backend.clip_and_step()
    save_weights(backend, out, "partial")
    return {}


def scenario_evaluated(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """No optimizer; weights loaded from rank 0 alone; a forward pass of each worker."""
    model = tiny_t5(seed=backend.rank)
    backend.setup(model, None)
    backend.state.load_model_state(tiny_t5(seed=5).state_dict() if backend.is_main else None)
    backend.model.eval()
    with torch.no_grad(), backend.autocast():
        loss = backend.model(**DATA.batch([0, 1, 2]))["loss"].item()
    expected = tiny_t5(seed=5).eval()(**DATA.batch([0, 1, 2])).loss.item()
    return {"loss": loss, "expected": expected, "weights_norm": backend.state.weights_norm()}


def with_precision(backend: Backend, **options: Any) -> Backend:
    """A backend of the same kind in the same group."""
    precision = get_precision(**{"fp16": False, "bf16": False, **options})
    if backend.name == "horovod":
        return type(backend)(precision)
    return type(backend)(precision) if type(backend) is LocalBackend else type(backend)(backend.accelerator, precision)


def reductions_begun(backend: Backend) -> list[bool]:
    """Filled at each reduction by Horovod with whether all gradients had been sent by then, by the backward pass."""
    sent, reduction, wait = [], backend.reduction, backend.reduction.after_backward

    def noted(last: bool) -> None:
        if last:
            handles = reduction._reducer._handles
            sent.append(
                len(handles) == len(reduction._reduced) and all(handle is not None for handle, _ in handles.values())
            )
        wait(last)

    if backend.name == "horovod":
        reduction.after_backward = noted
    return sent


def scenario_ahead(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """Steps whose updates are asked about at once, and again with a device that is trusted to skip the broken one."""
    clip_and_step, result = backend.clip_and_step, {"host_group": backend.name == "accelerate"}
    if result["host_group"]:  # as beside NCCL
        backend._host_group = host_group(backend.world_size, torch.device("cuda"), 60.0)
    for name in ("at_once", "late"):
        backend._runs_ahead, queued = name == "late", []

        def ahead(max_norm: float, queued: list[bool] = queued) -> PendingStep:
            step = clip_and_step(max_norm, wait=False)
            queued.append(not step.is_done)
            return step

        setup(backend, fused=True)
        backend.clip_and_step, sent = ahead, reductions_begun(backend)
        steps = [train_step(backend, step, broken=step == 2, max_norm=0.5) for step in range(5)]
        state = bits([backend.state.model_state(), backend.state.optimizer_state()])
        result["sent"] = sent
        result[name] = {"steps": json.loads(json.dumps(steps)), "state": state, "queued": queued}
        backend.clip_and_step = clip_and_step
    return result


def scenario_fp16(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """fp16 with loss scaling: a broken step halves the scale, which is part of the state."""
    backend = with_precision(backend, fp16=True, max_loss_scale=2.0**12)
    setup(backend)
    steps, scales = [], []
    for step in range(6):
        steps.append(train_step(backend, step, broken=step == 2, max_norm=0.5))
        scales.append(backend.precision.scaler.get_scale())
    tree = backend.state.optimizer_state()
    save_weights(backend, out, "fp16")
    other = with_precision(backend, fp16=True)
    setup(other)
    other.state.load_optimizer_state(tree)
    return {"steps": steps, "scales": scales, "loaded_scale": other.precision.scaler.get_scale()}


def scenario_bf16(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    backend = with_precision(backend, bf16=True)
    setup(backend)
    return {"steps": [train_step(backend, step, max_norm=0.5) for step in range(4)]}


def with_fp16_allreduce(backend: Backend) -> Backend:
    """A backend of the same kind in the same group that sends gradients as fp16."""
    group = () if backend.name == "horovod" else (backend.accelerator,)
    return type(backend)(*group, fp16_allreduce=True)


def scenario_wide_range(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """Gradients from 1 down to 1e-11 sent as fp16, as far apart as in a real model."""
    compressed = with_fp16_allreduce(backend)
    model = nn.Linear(1024, 1, bias=False)
    compressed.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    slope = torch.logspace(0, -11, 1024)
    for _ in range(2):  # DDP makes its buckets anew after the first step
        model.weight.grad = None
        with compressed.reduction.passes(last=True), compressed.autocast():
            compressed.backward(compressed.model(slope * (backend.rank + 1)).sum())
    total = slope.double() * backend.world_size * (backend.world_size + 1) / 2
    error = ((model.weight.grad[0] - total) / total).abs()
    first = slope > 2e-8
    return {"lost": (model.weight.grad == 0).float().mean().item(), "worst": error[first].max().item()}


def scenario_zero_16bit(backend: Backend, out: Path, _: Path) -> dict[str, Any]:
    """DeepSpeed's own bf16 and fp16: 16-bit model, fp32 slices; a broken step; fp32 weights in and out."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on any CPU; DeepSpeed wants a fast one
    config = backend.accelerator.state.deepspeed_plugin.deepspeed_config
    result = {}
    for kind, other in (("bf16", "fp16"), ("fp16", "bf16")):
        config[kind], config[other] = {**config[kind], "enabled": True}, {**config[other], "enabled": False}
        config["fp16"].update(loss_scale=0, initial_scale_power=8, hysteresis=1)
        backend.dtype = torch.bfloat16 if kind == "bf16" else torch.float16
        model = tiny_t5(seed=backend.rank)
        model.encoder.block[0].layer[0].SelfAttention.q.weight.requires_grad_(False)
        setup(backend, model=model)
        exact = []
        for seed in (0, 5):  # as given to the engine, which casts it, and loaded
            if seed:
                backend.state.load_model_state(tiny_t5(seed=seed).state_dict() if backend.is_main else None)
            held = backend.state.model_state()
            wanted = tiny_t5(seed=seed).state_dict() if backend.is_main else {}
            exact.append(all(torch.equal(held[name], value) for name, value in wanted.items()))
        steps, scales = [], []
        for step in range(4):
            before = bits(backend.state.model_state()) if step == 2 else None
            steps.append(train_step(backend, step, broken=step == 2, max_norm=0.5))
            scales.append(backend.optimizer.loss_scale)
            if step == 2:
                untouched = before == bits(backend.state.model_state())
        weights, tree = deepcopy(backend.state.model_state()), deepcopy(backend.state.optimizer_state())
        once = [
            train_step(backend, 4, max_norm=0.5),
            bits([backend.state.model_state(), backend.state.optimizer_state()]),
        ]
        backend.state.load_model_state(weights)
        backend.state.load_optimizer_state(tree)
        again = [
            train_step(backend, 4, max_norm=0.5),
            bits([backend.state.model_state(), backend.state.optimizer_state()]),
        ]
        result[kind] = {"steps": steps, "scales": scales, "untouched": untouched, "exact": exact}
        result[kind] |= {"again": once == again, "precision": tree["precision"]}
    return result


def main() -> None:
    # A worker that hangs says where, before launch.run kills it.
    faulthandler.dump_traceback_later(float(os.environ.get("WORKER_SECONDS", "130")), exit=True)
    out, earlier, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    try:
        backend = get_backend(TrainerArgs(**ARGS))
    except UserError as error:
        (out / f"refused_{os.getpid()}.json").write_text(json.dumps(str(error)))
        sys.exit(2)
    for name in names:
        result = globals()[f"scenario_{name}"](backend, out, earlier)
        (out / f"{name}_{backend.rank}.json").write_text(json.dumps({"launcher": detect_backend(), **result}))
    backend.close()


if __name__ == "__main__":
    main()
