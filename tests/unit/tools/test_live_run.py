"""The commands that look at a run, on one that another process is still training, and pruning as they look."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lm_experiments_tools.tools import suites
from lm_experiments_tools.tools.main import main
from tests.helpers import ROOT
from tests.helpers.runs import GPT2, records, tiny_run, words

KEPT = 2


@pytest.fixture
def live(tmp_path):
    """The directory of a run that saves every second update and keeps two checkpoints, until the test ends."""
    more = {"model_cls": "transformers:GPT2LMHeadModel", "task": "causal_lm", "keep_checkpoints": KEPT}
    flags = tiny_run(tmp_path, GPT2, **more, iters=1_000_000, speed="off")
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run_t5_pretraining.py"), *words(**flags, model_path=tmp_path / "run")],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "run" / "last").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert (tmp_path / "run" / "last").exists(), (tmp_path / "out.txt").read_text()[-3000:]
        yield tmp_path / "run"
        assert process.poll() is None, "the run did not outlive what looked at it"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_run_that_is_still_going(live, monkeypatch, capsys):
    assert main(["compare", str(live)]) == 0
    assert "running" in capsys.readouterr().out
    for _ in range(3):  # its checkpoints come and go meanwhile
        assert main(["generate", str(live), "word1 token2", "--max_new_tokens", "2", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(answers) == 3

    def measure(suite, name, tasks):
        model = suites.open_saved(name).model
        for task in tasks:
            yield task, {f"{task}/size": float(sum(weight.numel() for weight in model.parameters()))}

    monkeypatch.setattr(suites, "_lm_eval", measure)
    monkeypatch.setattr(suites.Suite, "check", lambda self: None)
    assert main(["evaluate", str(live), "--suite", "lm_eval", "--tasks", "a"]) == 0
    found = records(live, "lm_eval")
    assert found and len({record["step"] for record in found}) == len(found)
    steps = [record["step"] for record in records(live)]  # what the run logs is whole between what was added
    assert steps == list(range(1, len(steps) + 1))
    assert main(["compare", str(live)]) == 0
    assert "lm_eval: last (best @ its step)" in capsys.readouterr().out
    assert main(["export", str(live), "--to", str(live.parent / "out")]) == 0
