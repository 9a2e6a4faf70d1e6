"""Predictions of two workers with uneven data and no folder in common: the file and the metrics of one worker."""

from pathlib import Path

import pytest
import torch

from lm_experiments_tools.backends.backend import Backend, LocalBackend
from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.evaluation import predictions
from tests.helpers.evaluation_toys import args_of
from tests.helpers.thread_workers import Workers

NUMBER = 101
EXAMPLES = [Example(f"source {n}", (f"answer {n % 7}", "é"), name=f"id{n}") for n in range(NUMBER)]


class Characters:
    pad_id = 0

    def __call__(self, ids):
        return ["".join(chr(n) for n in row if n > 0) for row in ids.tolist()]

    def lengths(self, ids):
        return (ids > 0).sum(-1).tolist()


def rows_of(backend: Backend) -> list[int]:
    """Worker 1 of two has 20 rows, the last of them twice, and one that worker 0 has too."""
    every = list(range(NUMBER))
    mine = every[:81] if backend.rank == 0 else [*every[81:], NUMBER - 1, 5]
    return (mine if backend.world_size == 2 else every)[::-1]


def collect(backend: Backend, folder: Path) -> dict[str, float]:
    args = args_of(metrics=("bleu", "exact_match", "gen_len"))
    collector = predictions.Predictions(args, "valid", EXAMPLES, Characters(), (), folder)
    mine = rows_of(backend)
    for first in range(0, len(mine), 8):
        rows = mine[first : first + 8]
        again = [n in mine[: first + place] for place, n in enumerate(rows)]  # has another answer, which is not taken
        texts = [f"answer {n % 5} " + "x" * (n % 3 + 3 * is_again) for n, is_again in zip(rows, again, strict=True)]
        ids = [torch.tensor([ord(c) for c in text]) for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
        collector.add({"example": torch.tensor(rows)}, {"generation_outputs": ids})
    return collector.reduce(backend)


def work(backend: Backend, out: Path) -> tuple[dict[str, float], bytes | None, str]:
    """Metrics, the file of rank 0, and the error where nothing can take the file's place."""
    folder = out / f"folder_{backend.rank}"
    values = collect(backend, folder)
    assert [path.name for path in folder.iterdir()] == ["valid.jsonl"] * (backend.rank == 0)
    written = None
    if backend.is_main:
        written = (folder / "valid.jsonl").read_bytes()
        (folder / "valid.jsonl").unlink()
        (folder / "valid.jsonl").mkdir()
    with pytest.raises(RunError) as error:
        collect(backend, folder)
    return values, written, str(error.value)


def test_two_workers_write_the_file_of_one(tmp_path):
    pytest.importorskip("sacrebleu")
    values, written, _ = work(LocalBackend(), tmp_path / "one")
    assert set(values) == {"bleu", "exact_match", "gen_len"} and 0 < values["exact_match"] < 100
    assert values["gen_len"] == pytest.approx(sum(9 + n % 3 for n in range(NUMBER)) / NUMBER)
    two = Workers(2).run(lambda backend: work(backend, tmp_path / "two"))
    # both workers know the metrics, and both end with the sentence about the full or forbidden folder of rank 0
    assert [worker[:2] for worker in two] == [(values, written), (values, None)]
    assert all("valid.jsonl" in worker[2] for worker in two)
