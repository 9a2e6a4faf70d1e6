"""Token files against megatron-core, both directions: its reader on our files, our reader on its files.

In one subprocess: importing megatron.core loads thousands of modules and takes over a gigabyte.
"""

import importlib.util
import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from megatron.preprocess_data import PreprocessArgs, preprocess
from tests.helpers import ROOT
from tests.helpers.token_toys import write_tokens

pytestmark = pytest.mark.slow

# Reads each PREFIX with Megatron's reader and writes the same documents with its builder, to PREFIX-theirs, and to
# PREFIX-modes with a mode for each sequence. Our modules are imported beside it, as in a program that uses both.
MEGATRON = """
import json, sys
import megatron.core
import megatron.preprocess_data, megatron.tokenizers, megatron.sentences
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

results = []
for prefix in sys.argv[1:]:
    data = IndexedDataset(prefix)
    plain = IndexedDatasetBuilder(prefix + "-theirs.bin", dtype=data.index.dtype)
    modes = IndexedDatasetBuilder(prefix + "-modes.bin", dtype=data.index.dtype, multimodal=True)
    bounds = data.document_indices.tolist()
    for start, end in zip(bounds, bounds[1:]):
        for i in range(start, end):
            ids = torch.from_numpy(data[i].astype(np.int64))
            plain.add_item(ids)
            modes.add_item(ids, mode=i % 3)
        plain.end_document()
        modes.end_document()
    plain.finalize(prefix + "-theirs.idx")
    modes.finalize(prefix + "-modes.idx")
    with_modes = IndexedDataset(prefix + "-modes", multimodal=True)
    results.append({
        "sequences": [data[i].tolist() for i in range(len(data))],
        "bounds": bounds,
        "dtype": np.dtype(data.index.dtype).name,
        "modes": with_modes.index.sequence_modes.tolist(),
    })
print("RESULT " + json.dumps(results))
"""
TEXT = ["Mr. A went. He ran!\nStop", ["split.", "", "already"], "", "one"]


def sentence_files(folder: Path) -> Path:
    """What preprocess_data.py writes: several sequences a document."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.!"]
    (folder / "vocab.txt").write_text("\n".join([*pieces, *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    flags = "--split-sentences --append-eod --tokenizer-type BertWordPieceCase --input".split()
    flags += [folder / "data.jsonl", "--vocab-file", folder / "vocab.txt", "--output-prefix", folder / "made"]
    preprocess(parse(PreprocessArgs, list(map(str, flags)))[0])
    return folder / "made_text_sentence"


def random_files(prefix: Path, dtype, sizes) -> Path:
    rng = np.random.default_rng(0)
    draw = partial(rng.integers, 0, np.iinfo(dtype).max, endpoint=True)
    write_tokens(prefix, [[draw(rng.integers(1, 40)) for _ in range(size)] for size in sizes], dtype)
    return prefix


def documents(prefix) -> list[list[list[int]]]:
    data = IndexedDataset(prefix)
    return [[data[i].tolist() for i in range(a, b)] for a, b in pairwise(data.document_indices.tolist())]


def needs_megatron_core() -> None:
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")


def test_megatron_core_and_we_read_each_others_files(tmp_path):
    needs_megatron_core()
    prefixes = [
        random_files(tmp_path / "short", np.uint16, (1, 3, 2, 1)),
        random_files(tmp_path / "long", np.int32, (2, 1)),
        random_files(tmp_path / "with_empty_documents", np.uint16, (0, 2, 0, 0, 1, 0)),
        sentence_files(tmp_path),
    ]
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON, *map(str, prefixes)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    results = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))[7:])
    for prefix, read in zip(prefixes, results, strict=True):
        ours = documents(prefix)
        assert [read["sequences"][a:b] for a, b in pairwise(read["bounds"])] == ours
        assert read["dtype"] == IndexedDataset(prefix).dtype.name
        assert read["modes"] == [i % 3 for i in range(len(read["sequences"]))]
        for kind in ("theirs", "modes"):
            assert documents(f"{prefix}-{kind}") == ours
        assert Path(f"{prefix}.bin").read_bytes() == Path(f"{prefix}-theirs.bin").read_bytes()
        assert Path(f"{prefix}.idx").read_bytes() == Path(f"{prefix}-theirs.idx").read_bytes()
    assert [len(document) for document in ours] == [3, 2, 1]  # the empty document is left out
