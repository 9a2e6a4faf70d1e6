"""Attention of 32 to 512 tokens on a CPU, next to PyTorch's own. Writes benchmarks/attention_short.md.

    OMP_NUM_THREADS=1 python benchmarks/attention_short.py

Single calls, and steps of models whose layers are little more than attention. Ours and theirs take turns, and ratios
are medians of the ratios within a turn. Times are process CPU time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from attention import Inputs, make_inputs, timed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from lm_experiments_tools.attention import T5Bias, block_sparse_attention

LENGTHS = [32, 64, 128, 256, 512]
MODEL_TOKENS = 1024  # of a batch: models take seconds for more


@dataclass
class Masked(Inputs):
    """Inputs, a padding mask [batch, length] and SDPA's form of it."""

    padding: Tensor | None = None
    keys: Tensor | None = None

    def table(self) -> T5Bias:
        return T5Bias(self.weight)


# Per setting what a user of SDPA writes, and what one of ours does. All but the last give equal results.
SETTINGS: dict[str, tuple[Callable[[Masked], Tensor], Callable[[Masked], Tensor]]] = {
    "no mask": (lambda x: sdpa(x.q, x.k, x.v), lambda x: block_sparse_attention(x.q, x.k, x.v)),
    "padding": (
        lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.keys),
        lambda x: block_sparse_attention(x.q, x.k, x.v, key_padding_mask=x.padding),
    ),
    "causal": (
        lambda x: sdpa(x.q, x.k, x.v, is_causal=True),
        lambda x: block_sparse_attention(x.q, x.k, x.v, causal=True),
    ),
    "learned bias, a matrix": (
        lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.shared),
        lambda x: block_sparse_attention(x.q, x.k, x.v, bias=x.shared),
    ),
    "learned bias of T5": (
        lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.matrix()),
        lambda x: block_sparse_attention(x.q, x.k, x.v, bias=x.table()),
    ),
    "learned bias of T5, padding": (
        lambda x: sdpa(x.q, x.k, x.v, attn_mask=x.matrix().masked_fill(~x.keys, -math.inf)),
        lambda x: block_sparse_attention(x.q, x.k, x.v, bias=x.table(), key_padding_mask=x.padding),
    ),
    "(SDPA against itself)": (lambda x: sdpa(x.q, x.k, x.v), lambda x: sdpa(x.q, x.k, x.v)),
}


def make_masked(args: argparse.Namespace, batch: int, length: int, dtype: torch.dtype) -> Masked:
    args = argparse.Namespace(**{**vars(args), "tokens": batch * length})
    x = Masked(**vars(make_inputs(args, length, dtype)))
    x.shared = x.matrix().detach().requires_grad_()
    ends = torch.linspace(length, length / 2, batch + 1)[1:].long()
    x.padding = torch.arange(length) < ends[:, None]
    x.keys = x.padding[:, None, None, :]
    return x


def versus(theirs: Callable[[], object], mine: Callable[[], object], seconds: float = 0.3) -> tuple[float, float]:
    """(microseconds of a call of theirs, mine over theirs): medians of turns of 2 ms or one call, at least 7."""
    mine(), theirs()
    one = timed(theirs)
    repeats = max(1, round(2 / one))

    def turn(call: Callable[[], object]) -> float:
        return timed(lambda: [call() for _ in range(repeats)] and None) * 1e3 / repeats

    pairs = []
    for number in range(max(7, round(seconds * 500 / (one * repeats)))):
        first, second = (theirs, mine) if number % 2 else (mine, theirs)
        a, b = turn(first), turn(second)
        pairs.append((a, b) if number % 2 else (b, a))
    return statistics.median(a for a, _ in pairs), statistics.median(b / a for a, b in pairs)


def passes(call: Callable[[Masked], Tensor], x: Masked, backward: bool) -> Callable[[], object]:
    """A forward pass without gradients, or a forward and a backward pass."""
    if not backward:
        return torch.no_grad()(lambda: call(x))
    grad = torch.ones_like(x.q)
    leaves = [x.q, x.k, x.v, x.weight, x.shared]
    return lambda: torch.autograd.grad(call(x), leaves, grad, allow_unused=True)


def models(args: argparse.Namespace) -> dict[str, tuple[type, object]]:
    """Classes and configurations of four layers: in T5 64 features around the heads, in BERT heads * head_dim."""
    import transformers

    import lm_experiments_tools.attention.huggingface  # noqa: F401  registers "block_sparse"
    import modeling_bert
    import modeling_t5

    t5 = {"vocab_size": 64, "d_model": 64, "d_ff": 64, "num_layers": 4, "num_heads": args.heads, "d_kv": args.head_dim}
    t5["decoder_start_token_id"] = 0
    bert = {"vocab_size": 64, "hidden_size": args.heads * args.head_dim, "num_attention_heads": args.heads}
    bert |= {"num_hidden_layers": 4, "intermediate_size": 64, "max_position_embeddings": max(LENGTHS)}
    return {
        "transformers' T5": (transformers.T5ForConditionalGeneration, transformers.T5Config(**t5)),
        "transformers' BERT": (transformers.BertForMaskedLM, transformers.BertConfig(**bert)),
        "our T5": (modeling_t5.T5ForConditionalGeneration, modeling_t5.T5Config(**t5)),
        "our BERT": (modeling_bert.BertForPreTraining, modeling_bert.BertConfig(**bert)),
    }


def model_pass(cls: type, config: object, attention: str, batch: int, length: int, padded: bool) -> Callable[[], None]:
    """A training step without its optimizer."""
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=attention).eval()  # with dropout SDPA has no fused kernel
    ids = torch.randint(1, 64, (batch, length))
    ends = torch.linspace(length, length / 2, batch + 1)[1:].long() if padded else torch.full([batch], length)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(length) < ends[:, None]).long(), "labels": ids}
    if "Bert" in cls.__name__ and "PreTraining" in cls.__name__:
        inputs["next_sentence_label"] = torch.zeros(batch, dtype=torch.long)

    def call() -> None:
        model.zero_grad()
        model(**inputs).loss.backward()

    return call


Cells = dict[tuple[str, ...], dict[int, tuple[float, float]]]  # (microseconds of theirs, mine over theirs) by length


def measure(args: argparse.Namespace) -> None:
    """Calls and steps of models, written down after each length."""
    calls: Cells = {}
    whole: Cells = {}
    for dtype, batch, length in itertools.product(args.dtypes, (1, 8), LENGTHS):
        x = make_masked(args, batch, length, getattr(torch, dtype))
        for (name, pair), backward in itertools.product(SETTINGS.items(), (False, True)):
            row = calls.setdefault((dtype, str(batch), name, "both" if backward else "forward"), {})
            row[length] = versus(*(passes(call, x, backward) for call in pair))
            print(dtype, batch, length, name, backward, *row[length], flush=True)
        write_report(args, calls, whole)
    for batch, length, padded in itertools.product((1, 8), LENGTHS, (False, True)):
        for name, (cls, config) in models(args).items() if batch * length <= MODEL_TOKENS else ():
            row = whole.setdefault((name, str(batch), "padding" if padded else "full rows"), {})
            steps = (model_pass(cls, config, kind, batch, length, padded) for kind in ("sdpa", "block_sparse"))
            row[length] = versus(*steps)
            print(name, batch, length, padded, *row[length], flush=True)
        write_report(args, calls, whole)


def cell(measured: tuple[float, float] | None) -> str:
    return f"{measured[1]:.2f} ({measured[0]:,.0f})" if measured else ""


def table_of(heads: str, rows: Cells) -> str:
    lines = [f"| {heads} | {' | '.join(map(str, LENGTHS))} |", f"|{'---|' * (heads.count('|') + 6)}"]
    for key, cells in sorted(rows.items()):
        lines.append(f"| {' | '.join(key)} | {' | '.join(map(cell, map(cells.get, LENGTHS)))} |")
    return "\n".join(lines) + "\n"


def write_report(args: argparse.Namespace, calls: Cells, whole: Cells) -> None:
    found = []
    both, forward = ({key: cells for key, cells in calls.items() if key[-1] == name} for name in ("both", "forward"))
    for what, rows in (("calls, forward and backward,", both), ("forward calls", forward), ("model steps", whole)):
        ratios = [r for key, cells in rows.items() if "(SDPA against itself)" not in key for _, r in cells.values()]
        if ratios:
            within, middle = sum(r <= 1.05 for r in ratios), statistics.median(ratios)
            found.append(
                f"- of {len(ratios)} ratios of {what} {within} are at most 1.05; the median is {middle:.2f}, the "
                f"largest {max(ratios):.2f}\n"
            )
    command = " ".join(["OMP_NUM_THREADS=1 python benchmarks/attention_short.py", *sys.argv[1:]])
    args.output.write_text(
        f"# Attention: short inputs\n\n`{command}`\n\n"
        "Each number is the time of ours over that of SDPA given the same mask or bias, in brackets the microseconds "
        f'of SDPA; {args.heads} heads of {args.head_dim}, dense, `backend="auto"`; torch {torch.__version__}, '
        f"{torch.get_num_threads()} thread(s). Medians of interleaved turns of 2 ms or one call, at least 7; "
        "how far SDPA is from itself tells what to make of a ratio.\n\n"
        + "".join(found)
        + "\n"
        + table_of("dtype | batch | | pass", calls)
        + "\nTraining steps of models of four layers that are little more than attention (64 features between "
        'layers in T5), dropout off, float32: `attn_implementation="block_sparse"` over `"sdpa"`.\n\n'
        + table_of("model | batch | ", whole)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("attention_short.md"))
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
