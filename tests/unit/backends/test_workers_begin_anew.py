"""Workers that are started again: torchrun's under keys of their own, Horovod's in the same process."""

import http.server
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch.distributed as dist

from lm_experiments_tools.backends import horovod_elastic
from lm_experiments_tools.backends.process_groups import restarts_store
from lm_experiments_tools.config import restart
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.training.signals import StopSignals
from tests.helpers import ROOT

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1"}


def test_keys_of_a_restart_are_not_those_of_the_start_before(monkeypatch):
    for name, value in AGENT.items():
        monkeypatch.setenv(name, value)
    assert restarts_store() is None, "the first start"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    url, server = restarts_store(), dist.TCPStore("127.0.0.1", 0, is_master=True)  # the agent's
    server.set("rank0", "an address that was")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    store, rank, world_size = next(dist.rendezvous(url))
    assert (rank, world_size) == (0, 1)
    assert not store.check(["rank0"])
    store.set("rank0", "an address")
    assert server.get("rank0") == b"an address that was"


def test_restarts_on_several_machines_with_one_store_are_refused(monkeypatch):
    for name, value in {**AGENT, "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        restarts_store()


def test_a_worker_begins_anew_in_its_process_without_what_it_had(tmp_path):
    """Its folder, its arguments and its process are those of the start; its children and open files are gone."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "from lm_experiments_tools.config import restart\n"
        "from lm_experiments_tools.config.cli import run_main\n"
        "from lm_experiments_tools.errors import LostWorkerError\n"
        "def main():\n"
        "    anew, files = restart.has_begun_anew(), len(os.listdir('/proc/self/fd'))\n"
        "    print(os.getpid(), sys.argv[1:], os.getcwd(), anew, files)\n"
        "    if anew:\n"
        "        print(*open(f'/proc/self/task/{os.getpid()}/children').read().split())\n"
        "        return\n"
        "    os.chdir('/')\n"
        "    os.dup2(os.open('/dev/null', os.O_RDONLY), 77)\n"
        "    subprocess.Popen(['sleep', '20'], stdout=-3, stderr=-3)\n"
        "    raise LostWorkerError('lost rank 1')\n"
        "run_main(main)\n"
    )
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 60}
    environment = {**os.environ, "HOROVOD_ELASTIC": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    job = subprocess.run([sys.executable, program, "--flag", "a b"], env=environment, **options)
    assert job.returncode == 0, job.stderr
    first, second, children = job.stdout.split("\n")[:3]
    assert second == first.replace("False", "True") and "['--flag', 'a b']" in first
    assert children == ""
    assert "lost rank 1" in job.stderr
    del environment["HOROVOD_ELASTIC"]
    job = subprocess.run([sys.executable, program, "--flag", "a b"], env=environment, **options)
    assert (job.returncode, job.stdout.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("asked", "again"), [(set(), True), ({"hosts"}, True), ({"signal"}, False), ({"hosts", "signal"}, False)]
)
def test_a_worker_that_was_told_to_leave_itself_does_not_begin_anew(asked, again, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(restart, "_asked", asked)
    assert restart.is_restart(143) is again
    assert not restart.is_restart(0) and not restart.is_restart(130)
    monkeypatch.delenv("HOROVOD_ELASTIC")
    assert not restart.is_restart(143)


def test_other_hosts_stop_training_and_nothing_else(monkeypatch):
    """SIGTERM would end a worker that loads or has trained, and cost its host a place in the job."""
    monkeypatch.setattr(restart, "_asked", set())
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        restart.hosts_changed()
        with (signals := StopSignals()):
            restart.hosts_changed()
            assert signals.pending == [1, 0]
        restart.hosts_changed()
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert restart.is_restart(143)


@pytest.mark.parametrize(("given", "seconds"), [(None, "300"), ("20", "20")])
def test_an_elastic_job_waits_for_a_machine_that_loads_slowly(given, seconds, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", given or "")
    if given is None:
        monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS")
    horovod_elastic.listen(mock.Mock())
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == seconds


def test_the_driver_is_asked_for_the_rank_of_a_restarted_worker(monkeypatch):
    answers, asked = ["1,3,0,2,1,2", "-1,-1,-1,-1,-1,-1"], []

    class Driver(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[len(asked) - 1].encode())

        def log_message(self, *_):
            pass

    names = {"ELASTIC": "1", "HOSTNAME": "n2", "LOCAL_RANK": "0", "RANK": "5", "GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    with http.server.HTTPServer(("127.0.0.1", 0), Driver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {**names, "GLOO_RENDEZVOUS_PORT": str(server.server_port)}.items():
            monkeypatch.setenv(f"HOROVOD_{name}", value)
        for name in ("SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"):
            monkeypatch.setenv(f"HOROVOD_{name}", "?")
        horovod_elastic.ask_for_rank()
        assert not asked, "at its first start it is told"
        monkeypatch.setenv("LMTOOLS_WORKERS_CHANGED", "1")
        horovod_elastic.ask_for_rank()
        assert asked == ["/rank_and_size/n2:0"]
        told = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        assert ",".join(os.environ[f"HOROVOD_{name}"] for name in told) == answers[0]
        with pytest.raises(SystemExit) as ended:
            horovod_elastic.ask_for_rank()
        assert ended.value.code == 0, "the job goes on without it"
        server.shutdown()
    with pytest.raises(RunError, match="has ended"):
        horovod_elastic.ask_for_rank()
