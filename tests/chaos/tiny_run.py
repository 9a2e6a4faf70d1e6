"""The run that is killed: a tiny T5 with dropout through the real script, and what two runs must have in common."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from lm_experiments_tools.checkpoint.manifest import verify
from lm_experiments_tools.checkpoint.tree import load_tree
from tests.helpers.runs import TINY, words
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

ITERS = 11  # of 24 rows each, three epochs of the text; the last window of the log has three steps of four
PHASES = [
    {"iters": 4, "lr_scheduler": "linear", "num_warmup_steps": 2},
    {
        "iters": 4,
        "noise_density": 0.3,
        "target_seq_len": 24,
        "trained": ["decoder.block.*"],
        "gradient_accumulation_steps": 2,
    },
    {"iters": 3, "input_seq_len": 24, "lr": 1e-3, "optimizer_options": ["betas=0.8,0.9"]},
]  # as many steps
CLOCK = {
    "seconds", "data_seconds", "time", "seconds_per_step", "tokens_per_second", "mfu", "data_wait_fraction",
}  # fmt: skip
FOLDER = {"data_path"}  # each run has its own copy
PLACE = {"step", "split", "samples", "tokens", "metrics"}
ABOUT_WORKERS = ("workers", "world_size")


def make_inputs(folder: Path) -> None:
    folder.mkdir(parents=True)
    numbered_words_vocabulary(folder)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(20)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.json").write_text(json.dumps(TINY | {"dropout_rate": 0.1}))


def flags(
    inputs: Path,
    run: Path,
    *,
    reproducible: str,
    save_interval: int = 2,
    keep: int = 2,
    phased: bool = False,
    streaming: bool = False,
) -> list[str]:
    """The command line; the text is read from the run's own copy of it, so that each run tokenizes."""
    rows = 1 if reproducible == "elastic" else 4  # its batch is for 12 workers
    length = {"iters": ITERS, "lr_scheduler": "linear", "num_warmup_steps": 2}
    if phased:
        length = {"phases": tuple(map(json.dumps, PHASES))}
    if streaming:
        length |= {"streaming": True, "streams": 4}
    how = {**length, "batch_size": rows, "gradient_accumulation_steps": 3, "reproducible": reproducible}
    text = run / "text.jsonl"
    return words(
        data_path=text, valid_data_path=text, vocab=inputs / "vocab.model", model_cfg=inputs / "tiny.json",
        model_path=run / "model", input_seq_len=32, target_seq_len=8, lr=1e-2,
        log_interval=4, valid_interval=3, save_interval=save_interval,
        keep_checkpoints=keep, save_best=True, data_n_workers=1, peak_tflops=1,
        stall_timeout=20, seed=7, **how,
    )  # fmt: skip


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "model" / "checkpoints").glob("step_*"))


def tokenized(run: Path) -> bool:
    return any(run.rglob("tokens/*.idx"))


def contents(checkpoint: Path, *, elastic: bool) -> dict[str, str]:
    """Hash of each part of a verified checkpoint, without clocks and folders (`elastic`: nor numbers of workers)."""
    verify(checkpoint)
    parts = {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json")
    }
    tree = load_tree(checkpoint / "trainer_state")
    for name in ABOUT_WORKERS if elastic else ():
        del tree[name]
    for name, value in sorted(tree.items()):
        digest = hashlib.sha256()
        _feed(digest, value)
        parts[name] = digest.hexdigest()
    return parts


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            if key not in CLOCK | FOLDER:
                digest.update(f"{key}:".encode())
                _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "numpy") or hasattr(value, "tobytes"):
        array = value.numpy() if hasattr(value, "numpy") else value
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    else:
        digest.update(repr(value).encode())


def differing(checkpoint: Path, whole: Path, *, elastic: bool) -> list[str]:
    """Names of parts in which a checkpoint is not that of the same step of the uninterrupted run.

    A signal may cut a validation short, which the next start makes up for: the trainer state of such a checkpoint
    is its own.
    """
    ours, theirs = (contents(path, elastic=elastic) for path in (checkpoint, whole))
    unequal = [part for part in theirs if ours.get(part) != theirs[part]]
    if unequal and _last_validated(checkpoint) != _last_validated(whole):
        unequal = [part for part in unequal if part.endswith((".safetensors", ".json"))]
    return unequal


def _last_validated(checkpoint: Path) -> int:
    return load_tree(checkpoint / "trainer_state")["state"]["last_validated_step"]


def logged(run: Path) -> tuple[Counter, dict[tuple, Any]]:
    """How often metrics.jsonl has each (split, step, name), and the last value of each."""
    counts, values = Counter(), {}
    for line in (run / "model" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in record.keys() - PLACE - CLOCK:
            place = (record["split"], record["step"], name)
            counts[place] += 1
            values[place] = (record["samples"], record["tokens"], record[name])
    return counts, {p: v for p, v in values.items() if not p[2].startswith("memory")}


def drawn(run: Path) -> Counter:
    """How often TensorBoard shows each (tag, step), but for settings, which each end of training writes at step 0."""
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))  # else it imports TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "model"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    shown = [(tag, e.step) for tag in tags["scalars"] for e in events.Scalars(tag)]
    shown += [(tag, e.step) for tag in tags["tensors"] for e in events.Tensors(tag)]
    return Counter((tag, step) for tag, step in shown)


def faults_of_logs(run: Path, whole: Path) -> list[str]:
    """Sentences on metrics.jsonl and TensorBoard where they are not those of the uninterrupted run."""
    (counts, values), (_, expected) = logged(run), logged(whole)
    found = [f"metrics.jsonl has {place} {count} times" for place, count in counts.items() if count != 1]
    found += [
        f"metrics.jsonl has {values.get(place)} at {place}, not {expected.get(place)}"
        for place in sorted({*values, *expected}, key=str)
        if values.get(place) != expected.get(place) and not _nan(values.get(place))
    ]
    ours, theirs = drawn(run), drawn(whole)
    found += [f"TensorBoard shows {place} {count} times" for place, count in ours.items() if count != 1]
    found += [f"TensorBoard has {place} in one run alone" for place in sorted(ours.keys() ^ theirs.keys())]
    return found


def _nan(value: Any) -> bool:
    return value is not None and isinstance(value[2], float) and math.isnan(value[2])
