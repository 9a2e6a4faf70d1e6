"""Jobs whose workers die, whose hosts change and whose number of workers changes end by themselves with the weights of
the undisturbed run.

`ELASTIC_EVENTS=50 pytest -m slow tests/distributed/test_elastic_jobs.py` for more events in one run than four.
"""

import json
import os
import re
import sys
import threading
import time

import pytest

from tests.distributed import elastic_jobs
from tests.distributed.elastic_jobs import WORKER, event, final, horovod_job, samples, write_plan
from tests.distributed.launch import CPU, ROOT, run, skip_without, torchrun
from tests.helpers.runs import TINY, records
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(0)]

NUMBER = int(os.environ.get("ELASTIC_EVENTS", "4"))
GAP = 2  # steps between two events
STEPS = GAP * (NUMBER + 1)
# Of this machine, which Horovod takes for five: it must never need the one that has just lost its worker.
HOSTS = [f"{name}:1" for name in ("localhost", "127.0.0.1", "127.1", "127.0.1", "LOCALHOST")]
KINDS = ("kill", "raise", "leave")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return elastic_jobs.undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


def check(job, folder, undisturbed):
    assert job.returncode == 0, job.output[-3000:]
    assert len(list((folder / "events").iterdir())) == NUMBER
    assert elastic_jobs.digest(folder) == undisturbed
    assert job.output.count("resumed from") >= NUMBER


def test_torchrun_restarts_workers_that_die(undisturbed, tmp_path):
    write_plan(tmp_path, [event(GAP * n, KINDS[n % 3], n) for n in range(1, NUMBER + 1)])
    job = run([*torchrun(), "--max-restarts", str(NUMBER)], WORKER, STEPS, tmp_path, timeout=90 * NUMBER, **CPU)
    check(job, tmp_path, undisturbed)


def test_an_elastic_horovod_job_goes_on_when_workers_die_and_hosts_change(undisturbed, tmp_path):
    """Two workers on two of five hosts; one that has lost its worker is not used for longer than a restart takes."""
    kinds = [(GAP * n, "hosts" if n % 4 == 3 else KINDS[n % 3], n) for n in range(1, NUMBER + 1)]
    plan = [event(*each, hosts=HOSTS, take_own=each[1] == "hosts") for each in kinds]
    options = "-np 2 --min-np 2 --max-np 2 --blacklist-cooldown-range 10 20"
    job = horovod_job(tmp_path, plan, STEPS, options, discover=" ".join(HOSTS), timeout=90 * NUMBER)
    check(job, tmp_path, undisturbed)


WIDTHS = (3, 1, 2)  # workers after each event of a run that begins with two
RESIZED = 3 * (len(WIDTHS) + 1)  # steps


def resized_job(folder, *flags, widths=WIDTHS):
    """One of localhost, of 127.0.0.1 as many as it is given: first while the workers load, then each third step."""
    plan = [
        event(3 * n, "hosts", hosts=["localhost:1", *([f"127.0.0.1:{width - 1}"] if width > 1 else [])])
        for n, width in enumerate(widths)
    ]
    hosts = "localhost:1 127.0.0.1:1"
    return horovod_job(folder, plan, RESIZED, "-np 2 --min-np 1 --max-np 3", *flags, discover=hosts)


def sizes(folder):
    """Numbers of workers in the order in which they came; those that hear of others while they load make no step."""
    found = [int(size) for size in (folder / "starts").read_text().split()]
    return [size for i, size in enumerate(found) if i == 0 or found[i - 1] != size]


def test_an_elastic_horovod_job_computes_the_same_bits_with_other_numbers_of_workers(tmp_path):
    flag = "reproducible=elastic"
    job = resized_job(tmp_path, flag)
    assert job.returncode == 0, job.output[-3000:]
    assert sizes(tmp_path) == [2, *WIDTHS]
    (tmp_path / "whole").mkdir()
    assert elastic_jobs.digest(tmp_path) == elastic_jobs.undisturbed(tmp_path / "whole", RESIZED, flag)


def test_without_reproducible_another_number_of_workers_reads_on_where_the_others_stopped(tmp_path):
    job = resized_job(tmp_path)
    assert job.returncode == 0, job.output[-3000:]
    assert sizes(tmp_path) == [2, *WIDTHS]
    rows = sum(4 * line["size"] for line in final(tmp_path).values())
    assert len(final(tmp_path)) == RESIZED and samples(tmp_path) == list(range(rows))


def test_a_fixed_run_ends_with_a_sentence_when_its_number_of_workers_changes(tmp_path):
    job = resized_job(tmp_path, "reproducible=fixed", widths=(3,))
    assert job.returncode not in (0, None), job.output[-3000:]
    assert "fixed with 2 ranks, and this start has fixed with 3" in job.output
    assert (tmp_path / "starts").read_text().split() == ["2", "3"]


def test_torchrun_computes_the_same_bits_when_machines_come_and_go(tmp_path):
    """One launcher of a worker each; the second one is killed, the third one told to end."""
    flag, steps = "reproducible=elastic", 60
    (tmp_path / "whole").mkdir()
    whole = elastic_jobs.undisturbed(tmp_path / "whole", steps, flag)
    with elastic_jobs.Agents(tmp_path, steps, flag, PACE="0.5") as agents:
        first = agents.add()
        agents.wait_for(1)
        second = agents.add()
        agents.wait_for(2)
        third = agents.add()
        agents.wait_for(3)
        second.kill()
        agents.wait_for(2)
        third.terminate()
        agents.wait_for(1)
        assert first.wait(120) == 0, agents.output()
    assert sizes(tmp_path) == [1, 2, 3, 2, 1]
    assert elastic_jobs.digest(tmp_path) == whole


def resize(folder, run_dir):
    """Leave one host once there is a checkpoint, and bring the other back once the lone worker has saved."""
    for start, hosts in (("config.json", "localhost:1\n"), ("config.1.json", "localhost:1\n127.0.0.1:1\n")):
        end = time.monotonic() + 120
        while not (run_dir / start).exists() or not newer_checkpoint(run_dir, run_dir / start):
            if time.monotonic() > end:
                return
            time.sleep(0.1)
        (folder / "new").write_text(hosts)
        (folder / "new").replace(folder / "hosts")


def newer_checkpoint(run_dir, file):
    return any(step.stat().st_mtime > file.stat().st_mtime for step in (run_dir / "checkpoints").glob("step_*"))


def test_the_script_goes_on_when_the_number_of_workers_changes(tmp_path):
    skip_without("horovod")
    iters, run_dir = 400, tmp_path / "run"
    numbered_words_vocabulary(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "vocab_size": 256}))
    documents = (" ".join(f"word{(i * 7 + j * 3) % 9}" for j in range(80)) for i in range(60))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    options = ["-np", "2", "--min-np", "1", *elastic_jobs.discovering(tmp_path, "localhost:1 127.0.0.1:1")]
    flags = [
        "--data_path", tmp_path / "text.jsonl", "--data_pipeline", "native", "--vocab", tmp_path / "vocab.model",
        "--working_dir", tmp_path, "--model_cfg", tmp_path / "tiny.json", "--input_seq_len", 32, "--target_seq_len",
        16, "--batch_size", 2, "--iters", iters, "--save_interval", 20, "--lr", 1e-3, "--model_path", run_dir,
    ]  # fmt: skip
    resizing = threading.Thread(target=resize, args=(tmp_path, run_dir))
    resizing.start()
    script = ROOT / "run_t5_pretraining.py"
    job = run([*elastic_jobs.HOROVODRUN, *options], "python", script, *flags, timeout=200, HOME=str(tmp_path))
    resizing.join()
    assert job.returncode == 0, job.output[-3000:]
    sizes = [json.loads(file.read_text())["WORLD_SIZE"] for file in sorted(run_dir.glob("config*.json"))]
    assert sorted(sizes) == [1, 2, 2]
    (step, samples), (step_after, samples_after) = (
        map(int, found) for found in re.findall(r"resumed from .*: step (\d+), (\d+) samples", job.output)
    )
    assert samples == 4 * step and samples_after == samples + 2 * (step_after - step)
    assert records(run_dir)[-1]["samples"] == samples_after + 4 * (iters - step_after)


def test_a_lone_worker_of_an_elastic_horovod_job_keeps_no_gradients():
    """Horovod's optimizer sends gradients of one worker only in an elastic job."""
    skip_without("horovod")
    source = (
        "import os, torch\n"
        "from horovod.torch import mpi_ops\n"
        "from lm_experiments_tools.backends.horovod import HorovodBackend\n"
        "backend, model = HorovodBackend(), torch.nn.Linear(8, 8)\n"
        "os.environ['HOROVOD_ELASTIC'] = '1'  # after a start without a driver\n"
        "backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for _ in range(3):\n"
        "    with backend.accumulate(sync=True):\n"
        "        backend.backward(model(torch.ones(1, 8)).mean())\n"
        "    backend.clip_and_step()\n"
        "print('in flight', len(mpi_ops._handle_map))\n"
    )
    job = run([sys.executable], "-c", source)
    assert "in flight 0" in job.output, job.output[-2000:]
