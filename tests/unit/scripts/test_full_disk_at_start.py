"""A disk that is full before the first step: a sentence with the file, no traceback."""

import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.recipes.common import save_tokenizer
from lm_experiments_tools.tracking.run_directory import setup_logging
from tests.helpers import ROOT
from tests.helpers.pretrained_toys import save_toy, toy_args
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


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


@pytest.mark.parametrize("kilobytes", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_a_limit_on_the_size_of_files_names_what_was_written(tmp_path, kilobytes):
    """`ulimit -f`: no sentence of "the output", no traceback of the log file that cannot be written either."""
    numbered_words_vocabulary(tmp_path)
    (tmp_path / "tmp").mkdir()
    rows = "".join(f'{{"source": "word{n}", "target": "word{n}"}}\n' for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    command = f"ulimit -f {kilobytes}; exec {sys.executable} {ROOT}/run_finetuning.py --model_cfg t5-small --lr 1e-3 "
    command += "--tokenizer vocab.model --data_path rows.jsonl --iters 1 --batch_size 2 --input_seq_len 8 "
    command += "--target_seq_len 8 --backend local --model_path run"
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    job = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert job.returncode == 1 and "Traceback" not in job.stderr
    assert re.search(rf"error: rank 0: {tmp_path}/tmp/\S+: File too large", job.stderr.splitlines()[-1]), job.stderr


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


def test_a_refused_pickle_is_not_said_to_be_loaded_with_weights_only_false(tmp_path):
    folder = save_toy("encoder-decoder", tmp_path / "model")
    (folder / "model.safetensors").unlink()

    class Calls:
        def __reduce__(self):
            return os.getpid, ()

    torch.save({"shared.weight": Calls()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="use safetensors") as refusal:
        pretrained_model(toy_args(folder), transformers.AutoTokenizer.from_pretrained(folder))
    assert "weights_only" not in str(refusal.value)
