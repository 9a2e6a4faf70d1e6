"""Ray's own cluster of two nodes in this process: `lmtools launch --ray` and `lmtools tokenize --on ray` use it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.distributed.launch import environment, missing
from tests.helpers import ROOT
from tests.helpers.runs import losses, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT = "run_t5_pretraining.py"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray cluster of two nodes, with 80 MB of objects and two processors each."""
    if reason := missing("ray"):
        pytest.skip(reason)
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    yield cluster.address
    cluster.shutdown()


def lmtools(*command: object, address: str, timeout: float = 300, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lm_experiments_tools.tools.main", *map(str, command)],
        cwd=ROOT,
        env=environment(RAY_ADDRESS=address, RAY_USAGE_STATS_ENABLED="0", **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def test_the_workers_of_two_nodes_form_one_job_and_a_second_one_goes_on(address, flags, run_dir, data):
    flags |= {"iters": 20, "save_interval": None}
    ray = ("launch", "--ray", "--nodes", 2, "--env", f"PYTHONPATH={environment()['PYTHONPATH']}", "--")
    ended = lmtools(*ray, SCRIPT, *words(**flags), address=address)
    assert ended.returncode == 0 and "2 worker(s)" in ended.stdout, ended.stdout[-6000:]
    assert [step for step, _ in losses(run_dir)] == [10, 20]
    ended = lmtools(*ray, SCRIPT, *words(**flags | {"iters": 30}), address=address)
    assert ended.returncode == 0 and "step 20, 160 samples consumed" in ended.stdout, ended.stdout[-6000:]
    ended = lmtools(*ray, SCRIPT, *words(**flags | {"data_path": data / "absent"}), address=address)
    assert ended.returncode == 1 and "error: the run failed: " in ended.stdout, ended.stdout[-6000:]
    assert f"{data / 'absent'}" in ended.stdout


def test_tasks_of_the_cluster_tokenize_to_the_bytes_of_one_run(address, data, tmp_path):
    if reason := missing("datatrove"):
        pytest.skip(reason)
    text = {"input": data / "text.jsonl", "vocab": data / "vocab.model", "output": tmp_path / "parts"}
    ended = lmtools("tokenize", *words(**text, on="ray", shards=3), address=address)
    assert ended.returncode == 0, ended.stdout[-6000:]
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"parts{suffix}").read_bytes() == (data / f"tokens{suffix}").read_bytes()
    ended = lmtools("tokenize", *words(**text, on="ray", shards=3, text_key="body"), address=address)
    assert ended.returncode == 2 and "error: part 0 of 3: " in ended.stdout, ended.stdout[-6000:]


def test_a_worker_that_is_killed_is_started_again(address, flags, run_dir):
    flags["iters"] = 400
    start = [
        sys.executable,
        "-m",
        "lm_experiments_tools.tools.main",
        "launch",
        "--ray",
        "--nodes",
        "2",
        "--restarts",
        "1",
    ]
    names = environment(RAY_ADDRESS=address)
    job = [*start, "--env", f"PYTHONPATH={names['PYTHONPATH']}", "--", SCRIPT, *words(**flags)]
    with subprocess.Popen(
        job, cwd=ROOT, env=names, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ray:
        output = killed = ""
        for line in ray.stdout:
            output += line
            if not killed and "saved checkpoint of step 100" in line:
                killed = re.search(r"pid=(\d+)\) world_rank=1", output)[1]
                os.kill(int(killed), signal.SIGKILL)
    assert ray.returncode == 0 and killed and "resumed from " in output, output[-6000:]
    assert [step for step, _ in losses(run_dir)] == list(range(10, 401, 10))
