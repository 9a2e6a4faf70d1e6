"""Token files against megatron-core, both directions: its reader on our files, our reader on its files.

In a subprocess: importing megatron.core loads thousands of modules and takes over a gigabyte.
"""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from lm_experiments_tools.data.indexed import IndexedDataset, IndexedDatasetWriter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

# Reads PREFIX and writes the same documents to PREFIX-megatron with Megatron's own builder.
MEGATRON = """
import json, sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

prefix = sys.argv[1]
data = IndexedDataset(prefix)
builder = IndexedDatasetBuilder(prefix + "-megatron.bin", dtype=data.index.dtype)
bounds = data.document_indices.tolist()
for start, end in zip(bounds, bounds[1:]):
    for i in range(start, end):
        builder.add_item(torch.from_numpy(data[i].astype(np.int64)))
    builder.end_document()
builder.finalize(prefix + "-megatron.idx")
print("RESULT " + json.dumps({
    "sequences": [data[i].tolist() for i in range(len(data))],
    "lengths": data.sequence_lengths.tolist(),
    "documents": bounds,
    "dtype": np.dtype(data.index.dtype).name,
}))
"""


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_core_and_we_read_each_others_files(tmp_path, dtype):
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    rng = np.random.default_rng(0)
    limit = np.iinfo(dtype).max
    documents = [
        [rng.integers(0, limit, rng.integers(1, 40), endpoint=True).tolist() for _ in range(n)] for n in (1, 3, 2, 1)
    ]
    with IndexedDatasetWriter(tmp_path / "ours", dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()

    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON, str(tmp_path / "ours")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    read = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))[7:])
    assert read["sequences"] == [sequence for document in documents for sequence in document]
    assert read["documents"] == [0, 1, 4, 6, 7]
    assert read["dtype"] == np.dtype(dtype).name

    theirs, ours = IndexedDataset(tmp_path / "ours-megatron"), IndexedDataset(tmp_path / "ours")
    assert [theirs[i].tolist() for i in range(len(theirs))] == read["sequences"]
    assert theirs.document_indices.tolist() == read["documents"]
    assert theirs.fingerprint == ours.fingerprint
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"ours-megatron{suffix}").read_bytes()
