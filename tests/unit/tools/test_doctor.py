"""lmtools doctor: trials that work, fail, hang and are not there; missing packages; its exit code."""

import importlib.metadata
import json
import sys
import time

import psutil
import pytest

from lm_experiments_tools.tools import doctor
from lm_experiments_tools.tools.backend_trials import Trial, run_trials, trials
from lm_experiments_tools.tools.main import main

RIGHT = "the sum is right"


def script(code: str, **changed) -> Trial:
    return Trial("toy", [sys.executable, "-c", code], **{"workers": 1, **changed})


def test_trials_are_judged_by_what_they_print_and_return():
    jobs = [
        script(f"print({RIGHT!r})"),
        script(f"print({RIGHT!r})", workers=2),
        script(f"print({RIGHT!r}); raise SystemExit(3)"),
        script("raise ValueError('no such device')"),
        Trial("toy", ["no_such_launcher"]),
        script("", packages=("no_such_package",)),
        script(f"import os; assert 'RANK' not in os.environ; print({RIGHT!r})", environment=(("RANK", "0"),)),
    ]
    run_trials(jobs, 60)
    assert [job.state for job in jobs] == ["works", "fails", "fails", "fails", "fails", "absent", "fails"]
    assert jobs[3].says == "ValueError: no such device" and jobs[5].says == "no_such_package is not installed"
    assert "no_such_launcher" in jobs[4].says


def test_a_trial_that_hangs_is_ended_with_all_that_it_started():
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    job = script(f"{child}time.sleep(60)")
    start = time.monotonic()
    run_trials([job], 1)
    assert time.monotonic() - start < 20 and (job.state, job.says) == ("late", "it had not ended after 1 s")
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in left if "time.sleep(60)" in " ".join(p.cmdline())]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_add_up_under_torchrun(monkeypatch):
    """Within a job of another launcher too, whose variables are not theirs."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("RANK", "3")
    jobs = [job for job in trials(0) if job.name == "accelerate, gloo"]
    run_trials(jobs, 90)
    assert [(job.state, job.says) for job in jobs] == [("works", "")]


def test_more_gpus_are_tried_by_nccl():
    names = [job.name for job in trials(2)]
    assert "accelerate, nccl" in names and "horovod, gloo" in names
    assert "accelerate, nccl" not in [job.name for job in trials(1)]


@pytest.fixture
def told(monkeypatch):
    """A doctor whose trials end as told, at once."""
    states = {}

    def end(jobs, limit):
        for job in jobs:
            job.state, job.says = states.get(job.name, ("works", ""))
            job.facts = {"device": "cpu", "cuda": None} if job.name == "one process" else None

    monkeypatch.setattr(doctor, "run_trials", end)
    monkeypatch.setattr(doctor, "_why_no_cpp", lambda: None)
    return states


def test_exit_code_says_if_training_can_run(told, capsys):
    assert main(["doctor"]) == 0
    assert "training can run here" in capsys.readouterr().out
    told["horovod, gloo"] = ("fails", "ImportError: no")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backends"]["horovod, gloo"]["says"] == "ImportError: no" and found["can train"]
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    told["one process"] = ("fails", "ImportError: libc10.so")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "ImportError: libc10.so" in printed and "training cannot run here" in printed
    assert "lmtools build-horovod" in printed


def test_what_is_missing_is_named_with_the_command_of_its_extra(told, monkeypatch, capsys):
    real = importlib.metadata.version
    have = {"peft": "0.9", "accelerate": "1.15.0"}

    def version(name):
        if name == "bitsandbytes":
            raise importlib.metadata.PackageNotFoundError(name)
        return have.get(name) or real(name)

    required = ["torch>=2.12", 'peft>=0.21.2; extra == "peft"', 'bitsandbytes>=0.50; extra == "quantize"']
    required += ['accelerate>=1.15; extra == "accelerate"', 'x; python_version >= "9.1" and extra == "bert"']
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: required)
    assert doctor.missing_requirements() == {"peft": ["peft>=0.21.2"], "quantize": ["bitsandbytes>=0.50"]}
    assert main(["doctor"]) == 0
    assert "[quantize]" in capsys.readouterr().out
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["bitsandbytes>=0.50"])
    assert main(["doctor"]) == 1 and "cannot" in capsys.readouterr().out


def test_the_machine_is_as_the_system_says():
    assert doctor._space()["memory"].endswith(tuple("B"))
    assert doctor._compilers().keys() == {"g++", "nvcc", "mpirun", "cmake"}
