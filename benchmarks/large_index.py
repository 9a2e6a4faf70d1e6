"""Time to open the index of BERT's sentences at two starts of a run, on a synthetic index (benchmarks/data.md).

    python benchmarks/large_index.py --sentences 50000000 --workers 2 --folder FOLDER

FOLDER gets an index of 12 bytes a sentence and a .bin without content (sparse). Each start is so many processes that
open the file at once, as the workers of a machine do; the times are from their start to the last one's end, imports
not counted.
"""

import argparse
import multiprocessing
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.data.tokens.checked import open_checked

TOKENS, SENTENCES = 28, 20  # of a sentence, of a document
_BLOCK = 1 << 20


def write(prefix: Path, num_sentences: int) -> None:
    """Make PREFIX.bin and .idx: uint16, sentences of the same length."""
    num_documents = num_sentences // SENTENCES
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_sentences, num_documents + 1))
        for dtype, count, step in (("<i4", num_sentences, 0), ("<i8", num_sentences, 2 * TOKENS)):
            for start in range(0, count, _BLOCK):
                numbers = np.arange(start, min(start + _BLOCK, count), dtype=np.int64)
                file.write((numbers * step if step else np.full(len(numbers), TOKENS)).astype(dtype).tobytes())
        file.write((np.arange(num_documents + 1) * SENTENCES).astype("<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * TOKENS * num_sentences)


def open_once(prefix: Path, barrier: Any) -> None:
    barrier.wait()
    assert len(open_checked(prefix).fingerprint) == 64


def start(prefix: Path, num_workers: int) -> float:
    """Seconds of a start."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_workers + 1)
    workers = [context.Process(target=open_once, args=(prefix, barrier)) for _ in range(num_workers)]
    for worker in workers:
        worker.start()
    barrier.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    assert all(worker.exitcode == 0 for worker in workers)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=50_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(args.folder)  # what was checked is kept below the working directory
    prefix = Path("synthetic")
    write(prefix, args.sentences - args.sentences % SENTENCES)
    print(f"{os.path.getsize('synthetic.idx') / 1e9:.2f} GB of index")
    for name in ("first", "second", "third"):
        print(f"{name} start: {start(prefix, args.workers):.3f} s")


if __name__ == "__main__":
    main()
