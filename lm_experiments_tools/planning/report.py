"""A plan as lines for a terminal; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.planning.activations import parts_of
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
    step = plan.step
    return {
        "weights": "4 N in float32" if step.adapted is None else "held, and the adapter's",
        "gradients": f"of {plan.trained:,} parameters 4 bytes each, as far as they exist then",
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


def compared(plan: Plan, traced: Traced) -> list[str]:
    """The trace beside the closed form."""
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in traced.parts.items() if size)
    return [
        f"traced: {human_bytes(traced.peak)} in the {traced.moment} ({parts})",
        f"closed form / traced: {plan.peak.total / traced.peak:.3f}",
    ]
