"""A plan as lines for a terminal; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.planning.activations import parts_of
from lm_experiments_tools.planning.offload import Rate, link_rate, memory_rate
from lm_experiments_tools.planning.plan import Plan

if TYPE_CHECKING:
    from lm_experiments_tools.planning.trace import Traced

_LEAST = 0.005  # share of the peak from which a term is told apart


def lines_of(plan: Plan) -> list[str]:
    """What is planned, the parts at the highest moment, what the activations are, and what is needed beside."""
    args, step, model = plan.args, plan.step, plan.model
    lengths = f"{step.source} tokens" + (f" and {step.target}" if step.target else "")
    kind = {"fast": "our code's fast step", "own": "our code", "transformers": "transformers' code"}[step.code]
    lines = [
        f"{model.kind.upper()}, {model.parameters():,} parameters, {plan.trained:,} of them trained; {kind}",
        f"micro-batch {step.rows} x {lengths}, {'16-bit layers' if step.mixed else 'float32'}, {args.optimizer}"
        f"{', gradient checkpointing' if step.checkpointing else ''}, attention {step.attention}, on {plan.device}",
        "",
        f"{'at the highest moment':<28}{'GiB':>10}{'share':>8}",
    ]
    reasons = _reasons(plan)
    for name, size in plan.peak.parts.items():
        if size:
            share = size / plan.peak.total
            lines.append(f"  {name:<26}{size / 2**30:>10.3f}{share:>8.0%}  {reasons.get(name, '')}".rstrip())
    lines.append(f"  {'together':<26}{plan.peak.total / 2**30:>10.3f}{1:>8.0%}  {plan.peak.moment}")
    return [*lines, "", *_activations(plan), "", *_beside(plan), *(f"note: {note}" for note in plan.notes)]


def _reasons(plan: Plan) -> Mapping[str, str]:
    step, size = plan.step, 4 if plan.offload is None else plan.offload.value
    return {
        "weights": f"{size} N in {size * 8} bits" if step.adapted is None else "held, and the adapter's",
        "gradients": f"of {plan.trained:,} parameters {size} bytes each, as far as they exist then",
        "optimizer state": plan.state.why,
        "activations": "inputs of blocks, and one block again" if step.checkpointing else "kept for the backward pass",
        "logits and loss": "4 n V for each of logits, log-softmax and gradient; of our fast step one chunk",
        "communication": "buffers of gradients or weights between workers, or --reproducible's sums",
        "temporary": "gradients of activations, and of the token table",
    }


def _activations(plan: Plan) -> list[str]:
    """The terms of each part of the model, the larger ones."""
    parts = parts_of(plan.model, plan.step)
    whole = sum(part.count * part.saved for part in parts) or 1
    lines = [f"activations by the formulas, {human_bytes(whole)} without checkpointing"]
    for part in parts:
        kept = part.count * part.saved
        if kept < _LEAST * whole:
            continue
        each = f"{part.count} x {human_bytes(part.saved)}" if part.count > 1 else human_bytes(part.saved)
        lines.append(f"  {part.name}: {each}")
        sums: dict[str, float] = {}
        for term in part.terms:
            sums[term.why] = sums.get(term.why, 0) + term.size
        for why, size in sorted(sums.items(), key=lambda item: -item[1]):
            if size * part.count >= 2 * _LEAST * whole:
                lines.append(f"    {human_bytes(size):>11}  {why}")
    return lines


def _beside(plan: Plan) -> list[str]:
    """Inference, host, disk."""
    beams = getattr(plan.args, "num_beams", 1)
    rows, length = plan.args.valid_batch_size(), max(plan.step.target, 1)
    kinds = {name: plan.weights_as(name) for name in ("fp32", "bf16", "int8", "nf4")}
    lines = ["weights for inference: " + ", ".join(f"{name} {human_bytes(size)}" for name, size in kinds.items())]
    if plan.model.decoder_layers:
        caches = (human_bytes(plan.cache(rows, beams, length, size)) for size in (4, 2))
        lines.append(
            f"keys and values while {rows} rows x {beams} beam(s) write {length} tokens: "
            + ", in 16 bits ".join(caches)
        )
    copies = "with a copy while a checkpoint is saved" if plan.args.model_path else "without checkpoints"
    lines.append(f"main memory, roughly: {human_bytes(plan.host())} ({copies})")
    lines.append(f"a checkpoint on disk: {human_bytes(plan.checkpoint())}")
    return lines


def lines_of_offload(plan: Plan, *, measured: bool) -> list[str]:
    """The cost as lines, none where nothing is offloaded.

    Args:
        measured: torch may be loaded to measure copies to a GPU.
    """
    args, cost, lines = plan.args, plan.offload, []
    embeds = getattr(args, "embeddings_on_cpu", False) and not plan.model.tied
    places = getattr(args, "device_map", None)
    if plan.device == "cpu" or not (cost or embeds or places):
        return []
    link, memory = link_rate(measured=measured), memory_rate()
    if cost is not None:
        seconds = cost.down / link.speed, cost.up / link.speed, cost.touched / memory.speed
        lines += [
            f"offload, each optimizer step and worker: {sum(seconds):.3g} s, if computing hides nothing of it",
            f"  {human_bytes(cost.down)} of gradients down, {seconds[0]:.3g} s, and {human_bytes(cost.up)} up, "
            f"{seconds[1]:.3g} s, at {link.speed / 1e9:.3g} GB/s ({link.source})",
            f"  update on the CPU: {human_bytes(cost.touched)} read and written, {seconds[2]:.3g} s at "
            f"{memory.speed / 1e9:.3g} GB/s ({memory.source})",
        ]
    if embeds:
        lines.append(_embedded(plan, link))
    if places:
        lines.append(_placed(plan, link))
    return lines


def _embedded(plan: Plan, link: Rate) -> str:
    """The cost of a token table in main memory: features up, their gradients down."""
    step = plan.step
    up = 4 * plan.args.gradient_accumulation_steps * step.rows * (step.source + step.target) * plan.model.width
    down = 0 if "embeddings" in step.frozen or step.adapted is not None else up
    return (
        f"--embeddings_on_cpu, each optimizer step: {human_bytes(up)} of features up and {human_bytes(down)} of "
        f"gradients down, {(up + down) / link.speed:.3g} s at {link.speed / 1e9:.3g} GB/s ({link.source})"
    )


def _placed(plan: Plan, link: Rate) -> str:
    """The cost of layers that `--device_map` leaves in main memory: their weights go up in each forward pass."""
    model, kind = plan.model, plan.args.quantize or plan.args.inference_dtype or "fp32"
    encoder = model.encoder_layers * model.encoder_block
    shares = encoder / model.parameters(), 1 - encoder / model.parameters()
    whole = plan.weights_as(kind)
    passes = [f"all of them, {human_bytes(whole)}, {whole / link.speed:.3g} s a forward pass"]
    if model.decoder_layers:
        passes.append(f"{whole * shares[1] / link.speed:.3g} s for each token that is generated")
    return (
        f"--device_map {plan.args.device_map}: each GiB of weights left in main memory goes up once a forward pass, "
        f"{2**30 / link.speed:.3g} s at {link.speed / 1e9:.3g} GB/s ({link.source}); {', '.join(passes)}"
    )


def compared(plan: Plan, traced: Traced) -> list[str]:
    """The trace beside the closed form."""
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in traced.parts.items() if size)
    return [
        f"traced: {human_bytes(traced.peak)} in the {traced.moment} ({parts})",
        f"closed form / traced: {plan.peak.total / traced.peak:.3f}",
    ]
