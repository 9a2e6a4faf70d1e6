"""Files of examples/clusters/ next to stand-ins for srun, ssh and torchrun; tests/cluster runs them for real."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from tests.helpers import ROOT
from tests.helpers.cluster_examples import copy_example
from tests.helpers.token_toys import make_texts, write_jsonl

EXAMPLES = sorted(path.name for path in (ROOT / "examples" / "clusters").iterdir())
# Prints its folder and its arguments as JSON.
PRINTS = f"""#!/bin/bash
{sys.executable} -c 'import json, os, sys; print(json.dumps([os.getcwd(), *sys.argv[1:]]))' "$@"
"""
COMMAND = ["run_t5_pretraining.py", "--data_path", "a b", "$HOME", "it's", 'say "x"', "*;", "--model_path", "my run"]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Write a program to the front of PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def write(name, text):
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    return write


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_file_begins_with_its_command_and_is_linked_from_the_page(name):
    beginning = (ROOT / "examples" / "clusters" / name).read_text().splitlines()[:3]
    assert any(
        re.search(rf"(sbatch|sbatch --wait|bash|python|kubectl create -f) examples/clusters/{name}", line)
        for line in beginning
    )
    assert f"](../examples/clusters/{name})" in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize(
    ("name", "code_of_run", "terminated", "expected"),
    [("slurm.sbatch", code, False, code) for code in (0, 1, 143)]
    + [
        ("slurm_torchrun.sbatch", 0, False, 0),
        ("slurm_torchrun.sbatch", 1, False, 1),
        ("slurm_torchrun.sbatch", 1, True, 143),
        ("slurm_torchrun.sbatch", 0, True, 0),
    ],
)
def test_a_slurm_job_is_requeued_if_and_only_if_it_was_terminated(
    name, code_of_run, terminated, expected, program, monkeypatch
):
    """srun passes the tasks' code on, and a torchrun that gets SIGTERM exits with 1."""
    ends = f"{'kill -TERM $PPID' if terminated else ''}\nexit {code_of_run}\n"
    program("python" if name == "slurm.sbatch" else "torchrun", PRINTS + ends)
    program("srun", '#!/bin/bash\nshift 2\n"$@"\n')
    program("scontrol", '#!/bin/bash\n[ $1 = show ] && echo n1 || echo "$@"\n')
    slurm = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "8", "GPUS_ON_NODE": "4", "JOB_NODELIST": "n[1-2]"}
    for variable, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{variable}", value)
    job = ["bash", ROOT / "examples" / "clusters" / name, *COMMAND]
    ended = subprocess.run(job, capture_output=True, text=True, check=False)
    words, *requeued = ended.stdout.splitlines()
    assert json.loads(words)[-len(COMMAND) :] == COMMAND, ended.stderr
    assert ended.returncode == expected and requeued == (["requeue 7"] if expected == 143 else [])
    if name == "slurm_torchrun.sbatch":
        assert json.loads(words)[1:5] == ["--nnodes", "2", "--nproc_per_node", "4"] and "n1:15007" in words


def test_an_array_of_jobs_tokenizes_each_file_once(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program("lmtools", f'#!/bin/bash\nexec {sys.executable} -m lm_experiments_tools.tools.main "$@"\n')
    files = [f"text {number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        write_jsonl(tmp_path / file, make_texts(30, seed=number))
    tokenize = [sys.executable, "-m", "lm_experiments_tools.tools.main", "tokenize", "--vocab", "bytes", "--input"]
    job = ["bash", ROOT / "examples" / "clusters" / "tokenize.sbatch", "all", *files, "--vocab", "bytes"]
    jobs = ({"SLURM_ARRAY_TASK_COUNT": "2"}, {"SLURM_ARRAY_TASK_COUNT": "1", "JOBS": "2"}, {"JOBS": "9"})
    for number, settings in enumerate(jobs[:2]):
        subprocess.run(job, env=os.environ | settings | {"SLURM_ARRAY_TASK_ID": str(number)}, check=True)
        subprocess.run([*tokenize, *files[number::2], "--output", f"own-{number}"], check=True)
        for suffix in (".bin", ".idx"):
            own = (tmp_path / f"own-{number}{suffix}").read_bytes()
            assert (tmp_path / f"all-0000{number}{suffix}").read_bytes() == own
    subprocess.run(job, env=os.environ | jobs[2] | {"SLURM_ARRAY_TASK_ID": "5"}, check=True)
    assert not list(tmp_path.glob("all-00005*"))


def test_ssh_hosts_start_the_same_command_with_their_ranks(tmp_path, program, monkeypatch):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    program("torchrun", PRINTS)
    program("ssh", '#!/bin/bash\nexec sh -c "${@: -1}"\n')  # as sshd has the user's shell do
    script = copy_example("ssh_hosts.sh", tmp_path, HOSTS="(n1 user@n2)", WORKERS="4")
    ended = subprocess.run(["bash", script, *COMMAND], capture_output=True, text=True, check=True)
    for rank, host in enumerate(("n1", "user@n2")):
        (line,) = (line for line in ended.stdout.splitlines() if line.startswith(f"[{host}] "))
        numbers = f"--nnodes 2 --nproc_per_node 4 --node_rank {rank} --master_addr n1 --master_port 29500".split()
        assert json.loads(line.removeprefix(f"[{host}] ")) == [str(folder), *numbers, *COMMAND]


def test_a_failure_on_one_host_ends_the_others(tmp_path, program):
    program("torchrun", '#!/bin/bash\ncase "$*" in *"node_rank 1"*) exit 3;; esac\nexec sleep 60\n')
    program("ssh", '#!/bin/bash\nexec sh -c "${@: -1}"\n')
    script = copy_example("ssh_hosts.sh", tmp_path, HOSTS="(n1 n2 n3)")
    start = time.monotonic()
    ended = subprocess.run(["bash", script, *COMMAND], check=False)
    assert ended.returncode == 3 and time.monotonic() - start < 20
