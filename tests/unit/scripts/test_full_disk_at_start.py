"""A disk that is full before the first step: a sentence with the file, no traceback."""

import logging

import pytest

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import RunError
from lm_experiments_tools.recipes.common import save_tokenizer
from lm_experiments_tools.tracking.run_directory import setup_logging
from tests.helpers.pretrained_toys import toy_args


@pytest.mark.parametrize(
    "raised", [Exception("No space left on device (os error 28)"), OSError(28, "No space left on device")]
)
def test_the_folder_of_the_tokenizer_is_named(raised, tmp_path):
    """tokenizers raises a bare Exception, Python's own writing an error without the file."""

    def fail(folder):
        raise raised

    args = toy_args(None, model_path=str(tmp_path / "run"), model_cfg="t5-small", tokenizer="x")
    with pytest.raises(RunError, match=r"run/tokenizer: No space left on device.*free some space"):
        save_tokenizer(args, LocalBackend(), fail)


def test_a_log_on_a_full_disk_is_reported_once_and_without_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    setup_logging(tmp_path, 0)
    for number in range(3):
        logging.getLogger("run").info("line %d", number)
    said = capsys.readouterr().err
    assert said.count(f"{tmp_path}/logs/rank0.log cannot be written: No space left on device") == 1
    assert "Traceback" not in said and "line 2" in said
