"""Examples of worker processes are those of one process, in any order; a lost process ends the run."""

import pickle

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset, ParallelDataset
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows, TokensInMemory
from lm_experiments_tools.data.objectives.ul2 import UL2
from lm_experiments_tools.data.order import MixedSteps
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import RunError, UserError
from tests.helpers.token_toys import token_data

IDS = TokenIds(10_000, sentinel_ids=np.arange(9_999, 9_899, -1))


def mixture(limit=9_000):
    sources = [TokensInMemory(np.arange(10, limit, dtype=np.uint16), name) for name in "ab"]
    objective = UL2.create(IDS, 64, 64, mode_tokens=False)
    mixing = {"weights": [1.0, 2.0]}
    return Dataset.mixed(sources, lambda source, seed: TokenRows(source, objective, seed), 3, mixing)


def arranged(dataset):
    return dataset.arranged(MixedSteps(dataset.lengths, len(dataset), 16, 0))


def test_batches_are_those_of_one_process():
    alone, parallel = arranged(mixture()), arranged(ParallelDataset(mixture(), 3))
    assert parallel.fingerprint == alone.fingerprint and len(parallel) == len(alone)
    loaders = [TrainLoader(dataset, 8, 1, 2) for dataset in (alone, parallel)]
    for _ in range(100):
        expected, found = map(next, loaders)
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected)
    loaders[1].close()
    assert all(worker.process.returncode is not None for worker in parallel._pool._workers)


def test_an_error_of_a_process_is_the_runs_and_so_is_its_death():
    killed = ParallelDataset(mixture(), 2)
    killed._pool._workers[1].kill()
    with pytest.raises(RunError, match=r"a process that makes examples \(--data_n_workers\) ended with exit code -9"):
        for _ in range(3):
            killed.batch(np.arange(64))
    killed.close()
    tokens = np.full((1 << 20) + 1000, 20)
    tokens[-900:] = 10_001
    foreign = Dataset(TokenRows(TokensInMemory(tokens, "x"), UL2.create(IDS, 64, 64, mode_tokens=False)))
    parallel = ParallelDataset(foreign, 2)
    with pytest.raises(UserError, match="id 10001"):
        parallel.batch(np.arange(len(foreign)))
    parallel.close()


def test_processes_map_the_token_file_themselves(tmp_path):
    token_data(tmp_path / "tokens", [[np.arange(10, 9_000)]] * 50)
    dataset = Dataset(TokenRows(IndexedDataset(tmp_path / "tokens"), UL2.create(IDS, 64, 64, mode_tokens=False)))
    before = dataset.batch(np.arange(8))
    sent = pickle.dumps(dataset)
    assert len(sent) < 20_000
    assert all((pickle.loads(sent).batch(np.arange(8))[name] == values).all() for name, values in before.items())


def test_an_objective_that_cannot_be_sent_is_refused():
    dataset = mixture()
    dataset.members[0].objective.draw = lambda: None
    with pytest.raises(UserError, match="--data_n_workers: the objective cannot be sent to processes"):
        ParallelDataset(dataset, 2)
