"""Predictions of two workers with uneven data and no folder in common: the file and the metrics of one worker."""

import json

import pytest

from tests.distributed.launch import skip_without, slow, start

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.evaluation import predictions
from lm_experiments_tools.config.finetuning import FinetuningArgs

predictions.PIECE_BYTES = 500  # several pieces, of other numbers on each worker
out = Path(sys.argv[1])
backend = get_backend(TrainerArgs(batch_size=1))
folder = out / f"folder_{backend.rank}"

class Characters:
    pad_id = 0
    def __call__(self, ids):
        return ["".join(chr(n) for n in row if n > 0) for row in ids.tolist()]
    def lengths(self, ids):
        return (ids > 0).sum(-1).tolist()

number = 101
examples = [Example(f"source {n}", (f"answer {n % 7}", "é"), name=f"id{n}") for n in range(number)]
mine = list(range(number))
if backend.world_size == 2:  # worker 1 has 20, the last of them twice, and one that worker 0 has too
    mine = mine[:81] if backend.rank == 0 else [*mine[81:], number - 1, 5]
mine = mine[::-1]

def collect():
    args = FinetuningArgs(data_path=("x",), valid_data_path="y", model_cfg="t5-small",
                          metrics=("bleu", "exact_match", "gen_len"))
    collector = predictions.Predictions(args, "valid", examples, Characters(), (), folder)
    for first in range(0, len(mine), 8):
        rows = mine[first : first + 8]
        texts = [f"answer {n % 5} " + "x" * (n % 3) for n in rows]
        ids = torch.full((len(rows), max(map(len, texts))), -100)
        for row, line in zip(ids, texts):
            row[: len(line)] = torch.tensor([ord(c) for c in line])
        collector.add({"example": torch.tensor(rows)}, {"generation_outputs": ids})
    return collector.reduce(backend)

values = collect()
files = sorted(path.name for path in folder.iterdir())
if backend.is_main:
    (folder / "valid.jsonl").replace(out / "kept.jsonl")
    (folder / "valid.jsonl").mkdir()  # nothing can take its place now
try:
    collect()
    error = None
except RunError as raised:
    error = str(raised)
(out / f"{backend.rank}.json").write_text(json.dumps([values, files, error]))
backend.close()
"""


def results(kind, folder):
    """Metrics, files and error of each worker."""
    (folder / "script.py").write_text(SCRIPT)
    start(kind, folder / "script.py", folder)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    skip_without("sacrebleu")
    folder = tmp_path_factory.mktemp("one")
    return folder, *results("alone", folder)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", slow(["ddp", "horovod"], "horovod"))
def test_two_workers_write_the_file_of_one(tmp_path, one_worker, kind):
    folder, [values, files, error] = one_worker
    two = results(kind, tmp_path)
    assert files == ["valid.jsonl"] and "valid.jsonl" in error
    assert set(values) == {"bleu", "exact_match", "gen_len"} and 0 < values["exact_match"] < 100
    # both workers know the metrics, and both end with the sentence about the full or forbidden folder of rank 0
    assert [worker[0] for worker in two] == [values, values]
    assert [worker[1] for worker in two] == [["valid.jsonl"], []]
    assert all("valid.jsonl" in worker[2] for worker in two)
    assert (tmp_path / "kept.jsonl").read_bytes() == (folder / "kept.jsonl").read_bytes()
