"""`lmtools inspect` of names that are not there, without a network: one line, before torch is loaded."""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT

PROGRAM = """
import sys
from lm_experiments_tools.tools.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--data_path text.jsonl --vocab me/tok", "--vocab me/tok: there is no such folder, and the Hugging Face Hub"),
        ("finetune --tokenizer t5-smal --data_path text.jsonl", "--tokenizer t5-smal: there is no such folder"),
    ],
)
def test_a_name_that_is_not_there_is_one_line(tmp_path, monkeypatch, line, sentence):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a b", "source": "a", "target": "b"}) + "\n")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", PROGRAM, "inspect", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    said = [
        text for text in done.stderr.splitlines() if not text.endswith("available.")
    ]  # of packages that datasets has
    assert done.returncode == 2 and len(said) == 1 and said[0].startswith(f"error: {sentence}"), done.stderr
