"""OUTPUT/gpu.md from the results of benchmarks/gpu.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
_HEAD = """# On a GPU

Measured by benchmarks/gpu.py, whose head says how.
"""
_CHECK = ("passed", "passed", ""), ("result", "result", ""), ("waiting for data", "data_share", ".2%")
_CHECK += (("s/step", "seconds_per_step", ".4f"),)
# Title, description, and columns: head, key of the row, format.
_TABLES = {
    "environment": ("Machine", "TFLOP/s are of a product of 65,536 x 512 by 512 x 1,024.", [("device", "device", ""),
        ("Python", "python", ""), ("torch", "torch", ""), ("triton", "triton", ""),
        ("transformers", "transformers", ""), ("TFLOP/s", "product_tflops", ".0f")]),
    "attention": ("Attention", "Forward and backward with a trained T5 bias, 12 heads of 64, batches of 16,384 "
        "tokens, bf16, dropout 0 or 0.1.\nMilliseconds are the GPU's, medians of interleaved rounds; *host* is "
        "Python's time for queuing one pass. TFLOP/s\ncount the dense matrix, whatever the layout skips. Errors are "
        "against float64, relative to the largest value: of the\noutput, and the largest of the gradients.",
        [("ms", "ms", ".3f"), ("spread", "spread", ".0%"), ("host ms", "host_ms", ".2f"),
         ("TFLOP/s", "tflops", ".0f"), ("MiB", "mib", ",.0f"), ("output error", "output_error", ".1e"),
         ("gradient error", "gradient_error", ".1e")]),
    "kernels": ("Attention kernels", "Forward and backward with a trained T5 bias of 12 heads of 64, bf16: "
        "milliseconds of each Triton\nkernel, from a trace. *before*: the tree that `--before` names.",
        [("forward", "forward", ".3f"), ("dq and bias", "dq and bias", ".3f"), ("dk and dv", "dk and dv", ".3f"),
         ("sum", "ms", ".3f"), ("TFLOP/s", "tflops", ".0f")]),
    "cudnn": ("cuDNN", "cuDNN's attention with a bias matrix and its gradient: 128 x 512, 12 heads of 64, bf16.",
        [("ms", "ms", ".3f"), ("TFLOP/s", "tflops", ".0f"), ("gradient error", "gradient_error", ".1e")]),
    "step": ("A training step", "Random tokens, three interleaved turns of up to 30 steps for each loop; a turn ends "
        "with a synchronization. Seconds are\nthe median of the turns, *host* is Python's time for queuing a step. "
        "The share of peak\nis that of the data sheet (dense bf16). T5 trains without dropout, as nanoT5 does.",
        [("s/step", "seconds", ".4f"), ("host", "host", ".4f"), ("spread", "spread", ".0%"), ("steps", "steps", ""),
         ("tokens/s", "tokens_per_second", ",.0f"), ("of peak", "share_of_peak", ".0%"),
         ("allocated MiB", "allocated", ",.0f"), ("reserved MiB", "reserved", ",.0f"),
         ("interleaved", "interleaved", ""), ("device idle", "idle", ".1%")]),
    "memory": ("Memory", "Three training steps, MiB. Goal: predicted within 8 % of allocated.",
        [("predicted", "predicted", ",.0f"), ("allocated", "allocated", ",.0f"), ("reserved", "reserved", ",.0f"),
         ("predicted / allocated", "ratio", ".3f")]),
    "tiles": ("Tiles", "Milliseconds of a pass with one kernel's tile changed (queries, keys, warps, stages).",
        [("512 tokens", "ms_short", ".3f"), ("2,048 tokens", "ms_long", ".3f")]),
    "pytest": ("Tests", "`pytest -m gpu`, file by file.", _CHECK[:2]),
    "loop": ("The training loop", "The script on the GPU. A resumed run is compared with an uninterrupted "
        "one of 12 steps. Goals: the device is idle, and the\nloop waits for data, in less than 2 % of the time.",
        _CHECK),
    "launchers": ("Launchers", "The script in one process under each.", _CHECK[:2]),
}  # fmt: skip


def report(rows: list[Row], page: Path) -> None:
    """Write the page."""
    sections = [_HEAD]
    for part, (title, says, columns) in _TABLES.items():
        found = _merged([row for row in rows if row["part"] == part and "name" in row])
        inputs = list(dict.fromkeys(map(_inputs, found)))
        found.sort(key=lambda row: inputs.index(_inputs(row)))
        lines = [_line(row, columns) for row in found if not row.get("paste")]
        head = " | ".join(["inputs", "", *(column[0] for column in columns)])
        table = "\n".join([f"| {head} |", f"|{'---|' * (len(columns) + 2)}", *lines]) if lines else "Not measured yet."
        sections.append("\n\n".join(filter(None, [f"## {title}", says, table])) + "\n")
        sections += [f"{_kernels(row)}\n" for row in found if row.get("kernels")]
        for row in found:
            if row.get("paste"):
                sections.append(f"For `MEASURED` in attention/kernels/tiles.py:\n\n```python\n{row['paste']}\n```\n")
    page.write_text("\n".join(sections), encoding="utf-8")


def _kernels(row: Row) -> str:
    """Table of a traced step's kernels by kind."""
    lines = [f"| {kind} | {took:.2f} | {launches:.0f} |" for kind, (took, launches) in row["kernels"].items()]
    total, launches = (sum(column) for column in zip(*row["kernels"].values(), strict=True))
    head = f"Kernels of a step of {row['name']} ({_inputs(row)}):\n\n| kind | ms | launches |\n|---|---|---|\n"
    return head + "\n".join([*lines, f"| all | {total:.1f} | {launches:.0f} |"])


def _merged(rows: list[Row]) -> list[Row]:
    """One row for each measurement: what its last process reported."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = _inputs(row), row["name"]
        before = found.get(key, {})
        # errors are measured where kernels are compiled, in a case of their own
        is_again = before.get("case") == row["case"] and before["attempt"] != row["attempt"]
        found[key] = row if is_again else {**before, **row}
    return list(found.values())


def _inputs(row: Row) -> str:
    return row["case"].split(": ")[0].removeprefix("compile ")


def _line(row: Row, columns: Any) -> str:
    inputs = _inputs(row)
    cells = [inputs if inputs != row["name"] else "", f"`{row['name']}`" if "--" in row["name"] else row["name"]]
    if "error" in row or "skipped" in row:
        why = f"failed: {row['error']}" if "error" in row else f"skipped: {row['skipped']}"
        return f"| {' | '.join(cells)} | {why.replace('|', '/')} |{' |' * (len(columns) - 1)}"
    for _, key, form in columns:
        value = row.get(key)
        said = "" if value is None else "yes" if value is True else "**no**" if value is False else format(value, form)
        cells.append(said)
    return f"| {' | '.join(cells)} |"
