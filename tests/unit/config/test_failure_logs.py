"""The last sentence of a failed run stands in its log files too."""

import functools
import logging
import subprocess
import sys

import pytest

from lm_experiments_tools.config import cli
from lm_experiments_tools.errors import RunError, UserError
from tests.helpers import ROOT


def test_the_log_file_of_a_rank_ends_with_the_sentence_of_its_failure(tmp_path, monkeypatch, capsys):
    """The console of eight ranks drowns it in tracebacks."""
    monkeypatch.setenv("RANK", "3")
    handler = logging.FileHandler(tmp_path / "rank3.log")
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def main(error):
        error.step = 7
        raise error

    failures = {
        RunError("the loss diverged"): "error: rank 3 step 7: the loss diverged",
        UserError("no such file"): "error: no such file",
        OSError(28, "No space left on device", "x"): "error: rank 3 step 7: x: No space left on device",
    }
    for error, sentence in failures.items():
        with pytest.raises(SystemExit):
            cli.run_main(functools.partial(main, error))
        assert (tmp_path / "rank3.log").read_text().splitlines()[-1].startswith(sentence)
    crash = ZeroDivisionError("a deliberate failure")
    crash.step = 7
    sys.excepthook(type(crash), crash, None)
    last = (tmp_path / "rank3.log").read_text().splitlines()[-1]
    assert last.endswith("step 7: ZeroDivisionError: a deliberate failure")
    assert capsys.readouterr().err.count("a deliberate failure") == 2
    handler.close()


def test_a_launcher_that_has_ended_takes_no_sentence_from_the_log(tmp_path):
    """horovodrun ends before the workers that it asks to; their console is a pipe that nobody reads."""
    program = (
        "import logging, sys, time; from lm_experiments_tools.config.cli import run_main; "
        "from lm_experiments_tools.errors import RunError\n"
        f"logging.getLogger().addHandler(logging.FileHandler({str(tmp_path / 'rank0.log')!r}))\n"
        "def main():\n    sys.stdin.read()\n    raise RunError('lost rank 1')\n"
        "run_main(main)\n"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", program], **options) as process:
        process.stderr.close()
        process.stdin.close()
        assert process.wait(timeout=60) != 0
    assert (tmp_path / "rank0.log").read_text().endswith("error: rank 0: lost rank 1\n")
