"""Estimated and allocated memory of training steps: `python benchmarks/memory_plan.py`, which writes memory_plan.md.

The estimate is that of `lmtools plan`. Allocated is the peak of PyTorch's allocator in three real steps on a CPU, as
the profiler records it.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.planning.build import prepare
from lm_experiments_tools.planning.estimate import estimate_memory
from lm_experiments_tools.planning.trace import run_passes, update
from lm_experiments_tools.tools.plan import SCRIPTS

if TYPE_CHECKING:
    from lm_experiments_tools.config.training import ExperimentArgs
    from lm_experiments_tools.planning.trace import Prepared

MIB = 2**20
PAGE = Path(__file__).with_suffix(".md")
_T5 = "pretrain-t5 --lr 1e-3 --model_cls modeling_t5:T5ForConditionalGeneration"
_BERT = "pretrain-bert --lr 1e-3 --vocab_file - --model_cls modeling_bert.modeling_bert:BertForPreTraining"
_TUNED = "finetune --speed off --lr 1e-3"
_START = "first step"
# Command lines of `lmtools plan`.
CASES = (
    "pretrain-t5 --speed off --lr 1e-3 --model_cfg t5-small --batch_size 2 --input_seq_len 128",
    f"{_T5} --no_bf16 --model_cfg t5-small --batch_size 2 --input_seq_len 128 --optimizer Adafactor",
    f"{_T5} --no_bf16 --model_cfg t5-micro --batch_size 4 --gradient_accumulation_steps 4 --input_seq_len 128",
    f"{_T5} --bf16 --model_cfg t5-v1_1-small --batch_size 2 --input_seq_len 128",
    f"{_T5} --bf16 --model_cfg t5-v1_1-small --batch_size 4 --input_seq_len 256 --gradient_checkpointing",
    f"{_T5} --no_bf16 --model_cfg t5-small-bigbird --batch_size 1 --input_seq_len 1024",
    "pretrain-bert --speed off --lr 1e-3 --vocab_file - --model_cfg bert-mini --batch_size 8 --input_seq_len 128",
    f"{_BERT} --bf16 --model_cfg bert_base_uncased-4L_preln_rel --batch_size 2 --input_seq_len 256 "
    "--gradient_checkpointing",
    f"{_TUNED} --peft lora --model_cfg t5-small --batch_size 8 --input_seq_len 128 --target_seq_len 32",
    f"{_TUNED} --freeze embeddings encoder --model_cfg t5-small --batch_size 8 --input_seq_len 128 "
    "--target_seq_len 32",
    f"{_TUNED} --model_type encoder --model_cfg bert-mini --batch_size 8 --input_seq_len 128",
)


def make_steps(prepared: Prepared, micro_batches: int = 1) -> None:
    """Three training steps."""
    prepared.model.train()
    for _ in range(3):
        for _ in range(micro_batches):
            run_passes(prepared)
        update(prepared)
        prepared.optimizer.zero_grad(set_to_none=True)


def allocated_peak(args: ExperimentArgs) -> int:
    """Largest number of bytes that the allocator holds in three steps on a CPU.

    Args:
        args: with the choices of `--speed auto`.
    """
    steps = args.gradient_accumulation_steps
    return peak_of(lambda: prepare(args, "cpu"), lambda prepared: make_steps(prepared, steps))


def peak_of(build: Callable[[], Any], run: Callable[[Any], object]) -> int:
    """Largest number of bytes that the allocator holds in `run(build())`, with what `build` has made, on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        built = build()
        with record_function(_START):
            pass
        run(built)
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _START)
    total = peak = 0
    for moment, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total) if moment >= start else peak
    return peak


def row(case: str) -> str:
    """A line of the table."""
    name, *flags = shlex.split(case)
    args, origins = parse(SCRIPTS[name], [*flags, "--device", "cpu"])
    started = time.process_time()
    estimate = estimate_memory(args, args, origins)
    seconds = time.process_time() - started
    allocated = allocated_peak(estimate.args)
    command = " ".join(word for word in case.split() if word not in ("--vocab_file", "-"))
    cells = f"{estimate.total / MIB:,.0f}", f"{allocated / MIB:,.0f}", f"{estimate.total / allocated:.3f}"
    return f"| `{command}` | {' | '.join(cells)} | {seconds:.1f} |"


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = []
    for case in CASES:
        rows.append(row(case))
        print(rows[-1], flush=True)
    PAGE.write_text(_PAGE.format(rows="\n".join(rows)), encoding="utf-8")


_PAGE = """# Memory of training steps: estimated and allocated

`python benchmarks/memory_plan.py` writes this page. MiB at the peak of a training step on a CPU. *estimated*: `lmtools
plan`. *allocated*: PyTorch's allocator in three real steps, as torch.profiler records it. *s*: CPU seconds of a trace.

Work space inside block-sparse attention is not estimated. Two workers under DDP and FSDP2 agree within 15 %, the
spread of their measured peaks (`python -m pytest tests/unit/planning/test_shares.py`). Nothing here ran on a GPU.

| flags | estimated | allocated | estimated / allocated | s |
|---|---|---|---|---|
{rows}
"""

if __name__ == "__main__":
    main()
