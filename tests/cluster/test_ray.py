"""examples/clusters/ray_train.py on Ray's own cluster of two nodes in this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launch import environment, skip_without
from tests.helpers import ROOT
from tests.helpers.cluster_examples import copy_example
from tests.helpers.runs import losses, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SCRIPT = "run_t5_pretraining.py"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray cluster of two nodes, with 80 MB of objects and two processors each."""
    skip_without("ray")
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def ray_train(tmp_path: Path) -> Path:
    """The example with two workers and one restart."""
    edits = {"NUM_WORKERS": "2", "RESOURCES_PER_WORKER": '{"CPU": 1}', "MAX_FAILURES": "1"}
    return copy_example("ray_train.py", tmp_path, **edits)


def test_workers_of_two_nodes_form_one_job_and_are_restarted(address, ray_train, flags, run_dir):
    """One of them is killed after the first checkpoint."""
    flags |= {"iters": 300, "save_interval": 100}
    job = [sys.executable, ray_train, SCRIPT, *words(**flags)]
    with subprocess.Popen(job, cwd=ROOT, env=environment(RAY_ADDRESS=address), **PIPES) as ray:
        output = killed = ""
        for line in ray.stdout:
            output += line
            if not killed and "saved checkpoint of step 100" in line:
                killed = re.search(r"pid=(\d+)\) world_rank=1", output)[1]
                os.kill(int(killed), signal.SIGKILL)
    assert ray.returncode == 0 and "2 worker(s)" in output, output[-6000:]
    assert killed and "resumed from " in output
    assert [step for step, _ in losses(run_dir)] == list(range(10, 301, 10))
