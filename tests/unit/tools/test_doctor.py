"""lmtools doctor: an update in one process; missing packages; its exit code."""

import importlib.metadata

import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.tools import doctor
from lm_experiments_tools.tools.main import main


def test_exit_code_says_if_training_can_run(monkeypatch, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "training can run here" in printed and f"torch {importlib.metadata.version('torch')}" in printed
    assert f"works on {LocalBackend().device}" in printed
    monkeypatch.setattr(LocalBackend, "setup", lambda *_: torch.ones(2) @ torch.ones(3))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "one update   RuntimeError: " in printed and "training cannot run here" in printed


def test_what_is_missing_is_named_with_the_command_of_its_extra(monkeypatch, capsys):
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
