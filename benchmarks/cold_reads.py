"""Examples a second of data that is not in memory, and the bytes read for each, by what the system is told.

    python benchmarks/cold_reads.py --folder /scratch --gigabytes 4
    python benchmarks/cold_reads.py --folder /scratch --gigabytes 2 --memory 0.5 1 2 4

makes a token file of random ids in FOLDER and reads examples of 568 tokens (1.1 KB) out of it by `TrainLoader`, in
batches of 64, each way in a process of its own, in turns:

* plain: nothing is said; a page that is missed is read with its surroundings (`read_ahead_kb` of the disk).
* random: MADV_RANDOM.
* random, ahead: and 256 examples or more are asked for before they are read (POSIX_FADV_WILLNEED): what a run does.
* in memory: all was read before.

Before each the file is dropped from memory (POSIX_FADV_DONTNEED, which needs no rights and touches no other file).
Bytes read are the system's count for the process (/proc/self/io). With --memory each process may have as many GB, page
cache included (cgroup v1 or v2, for root): at which part of its memory it pays to give advice.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

BATCH = 64
WAYS = "plain", "random", "random, ahead", "in memory"
ROOT = Path(__file__).resolve().parents[1]


def make_tokens(prefix: Path, gigabytes: float) -> None:
    from lm_experiments_tools.data.tokens.indexed import IndexedDatasetWriter, dataset_exists

    wanted = int(gigabytes * 2**30) // 2
    if dataset_exists(prefix):
        return
    block = np.random.default_rng(0).integers(1, 32_000, 1 << 22).astype(np.uint16)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        while writer.num_tokens < wanted:
            writer.add_sequence(block)
            writer.end_document()
        writer.finalize({"bin_sha256": writer.bin_sha256})


def bytes_read() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def measure(prefix: Path, way: str, seconds: float) -> dict[str, float]:
    """Examples a second, and KB read for each."""
    from lm_experiments_tools.data.loader import TrainLoader
    from lm_experiments_tools.data.objectives.denoising import SpanCorruptionDataset
    from lm_experiments_tools.data.tokens.cold import advise_random
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset

    drop(prefix)
    tokens = IndexedDataset(prefix)
    if way == "in memory":
        with open(tokens.bin_path, "rb") as file:
            while file.read(1 << 24):
                pass
    elif way != "plain":
        advise_random(tokens.tokens)
    sentinels = np.arange(32_099, 31_999, -1)
    dataset = SpanCorruptionDataset(
        tokens, 512, 114, sentinel_ids=sentinels, eos_id=1, pad_id=0, vocab_size=32_100, quiet=True
    )
    loader = TrainLoader(dataset, BATCH, ahead=way == "random, ahead")
    next(loader)
    begin, read, rows = time.perf_counter(), bytes_read(), 0
    while time.perf_counter() - begin < seconds:
        next(loader)
        rows += BATCH
    loader.close()
    took = time.perf_counter() - begin
    return {"examples/s": rows / took, "KB each": (bytes_read() - read) / rows / 1024, "examples": rows}


def drop(prefix: Path) -> None:
    with open(f"{prefix}.bin", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def limited_to(gigabytes: float) -> Path:
    """A group of processes that may have so much memory; the caller joins it."""
    cgroups = Path("/sys/fs/cgroup")
    old = cgroups / "memory"
    group = (old if old.is_dir() else cgroups) / f"cold_reads_{os.getpid()}"
    group.mkdir()
    limit = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
    (group / limit).write_text(str(int(gigabytes * 2**30)))
    return group


def one_way(args: argparse.Namespace, way: str, memory: float | None) -> dict[str, float]:
    """`measure` in a process of its own."""
    group = limited_to(memory) if memory else None
    command = [sys.executable, __file__, "--folder", args.folder, "--gigabytes", str(args.gigabytes)]
    command += ["--seconds", str(args.seconds), "--way", way]
    if group is not None:
        command += ["--group", str(group)]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    finally:
        if group is not None:
            group.rmdir()
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the token file, which is made once")
    parser.add_argument("--seconds", type=float, default=20.0, help="of reading, at most, in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, nargs="*", default=[None], help="GB that a process may have")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    prefix = Path(args.folder) / f"cold_{args.gigabytes:g}"
    if args.way:
        if args.group:
            (args.group / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(measure(prefix, args.way, args.seconds)))
        return
    make_tokens(prefix, args.gigabytes)
    ways = WAYS if args.memory == [None] else WAYS[:3]
    for number in range(args.rounds):
        for memory in args.memory:
            for way in ways:
                found = {name: round(value, 1) for name, value in one_way(args, way, memory).items()}
                print(f"round {number}, memory {memory}, {way}: {found}", flush=True)


if __name__ == "__main__":
    main()
