"""Text of an encoder-decoder written by ONNX Runtime and by torch, both with a cache.

    OMP_NUM_THREADS=1 python benchmarks/onnx_generation.py

One model of the size of t5-v1_1-small with random weights, exported as `lmtools export` does; torch, ONNX Runtime with
its cache and without write the same texts in turn. Times are process CPU time; ratios are medians of the ratios within
a turn.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time

import onnxruntime
import torch
import transformers
from torch import Tensor

from lm_experiments_tools.models.build import build_model
from lm_experiments_tools.tools.onnx_export import OnnxModel, export

NAMES = "torch", "ONNX, cache", "ONNX, no cache"


def measure(writers: dict, turns: int, **ask: Tensor | int) -> dict[str, list[float]]:
    """CPU seconds of each turn by name; all must write the same."""
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    for turn in range(turns + 1):  # the first warms up
        texts = []
        for name, writer in writers.items():
            started = time.process_time()
            texts.append(writer.generate(**ask))
            if turn:
                seconds[name].append(time.process_time() - started)
        assert all(torch.equal(texts[0], text) for text in texts)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_heads=6, num_layers=args.layers,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    config.tie_word_embeddings = False
    model = build_model(transformers.T5ForConditionalGeneration, config, seed=0).eval()
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 32000, (4, 128), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        export(model, folder)
        cached, plain = OnnxModel(folder), OnnxModel(folder)
    plain.generate = functools.partial(plain.generate, use_cache=False)
    model.set_attn_implementation("sdpa")
    writers = dict(zip(NAMES, (model, cached, plain), strict=True))
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {torch.get_num_threads()} thread(s)")
    for beams in (1, 4):
        some = writers if beams == 1 else {name: writers[name] for name in NAMES[:2]}
        ask = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "min_new_tokens": args.tokens}
        ask["max_new_tokens"] = args.tokens
        seconds = measure(some, args.turns, **ask, num_beams=beams)
        for name, taken in seconds.items():
            ratios = [own / other for own, other in zip(taken, seconds["torch"], strict=True)]
            print(
                f"{beams} beam(s) | {name} | {statistics.median(taken):.2f} s | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
