"""The last sentence of a failed run stands in its log files too."""

import functools
import logging
import sys

import pytest

from lm_experiments_tools.config import cli
from lm_experiments_tools.errors import RunError, UserError


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
