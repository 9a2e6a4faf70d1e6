"""lmtools doctor: an update in one process; missing packages; its exit code."""

import importlib.metadata
import json

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.tools import doctor
from lm_experiments_tools.tools.main import main


@pytest.fixture
def told(monkeypatch):
    """A doctor whose update in one process ends as told."""
    facts = {"device": "cpu", "cuda": None}
    monkeypatch.setattr(doctor, "_one_process", lambda: dict(facts))
    monkeypatch.setattr(doctor, "_why_no_cpp", lambda: None)
    return facts


def test_exit_code_says_if_training_can_run(told, capsys):
    assert main(["doctor"]) == 0
    assert "training can run here" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can train"] and found["versions"]["torch"] == importlib.metadata.version("torch")
    told["error"] = "ImportError: libc10.so"
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "ImportError: libc10.so" in printed and "training cannot run here" in printed


def test_an_update_is_tried_in_this_process(monkeypatch):
    found = doctor._one_process()
    assert (found["device"], found["threads"]) == (str(LocalBackend().device), torch.get_num_threads())
    monkeypatch.setattr(LocalBackend, "setup", lambda *_: torch.ones(2) @ torch.ones(3))
    assert doctor._one_process()["error"].startswith("RuntimeError: ")


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
