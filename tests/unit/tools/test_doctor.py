"""lmtools doctor: an update in one process; its exit code."""

import importlib.metadata

import torch

from lm_experiments_tools.backends.backend import LocalBackend
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
