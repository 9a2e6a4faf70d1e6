"""The learning-rate range test on two workers: the same global batch as on one."""

import json

import pytest

from tests.distributed.launch import ROOT, slow, start

WORKER = ROOT / "tests" / "distributed" / "lr_finder_worker.py"

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The range test of one process, 24 rows an update."""
    folder = tmp_path_factory.mktemp("alone")
    start("alone", WORKER, folder)
    return json.loads((folder / "find_lr.json").read_text())


@pytest.mark.parametrize("kind", slow(["horovod", "ddp"], "ddp"))
def test_two_workers_find_what_one_finds(kind, alone, tmp_path):
    start(kind, WORKER, tmp_path)
    found = json.loads((tmp_path / "find_lr.json").read_text())
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)  # far beyond the edge rounding grows
    assert found["edge"] == alone["edge"]
