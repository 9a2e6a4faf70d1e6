"""A disk that is full before the first step: a sentence with the file, no traceback."""

import os

import pytest
import torch
import transformers

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.models.pretrained import pretrained_model
from lm_experiments_tools.recipes.common import save_tokenizer
from tests.helpers.pretrained_toys import save_toy, toy_args, toy_tokenizer


@pytest.mark.parametrize(
    "raised", [Exception("No space left on device (os error 28)"), OSError(28, "No space left on device")]
)
def test_the_folder_of_the_tokenizer_is_named(raised, tmp_path):
    """tokenizers raises a bare Exception, Python's own writing an error without the file."""

    def fail(folder):
        raise raised

    args = toy_args(None, model_path=str(tmp_path / "run"), model_cfg="t5-small", tokenizer="x")
    with pytest.raises(RunError, match="run/tokenizer: No space left on device.*free some space"):
        save_tokenizer(args, LocalBackend(), fail)


def test_tokenizers_own_error_is_of_this_kind(tmp_path):
    """/dev/full: what the library raises on a full disk."""
    with pytest.raises(Exception, match="os error 28") as error:
        toy_tokenizer().backend_tokenizer.save("/dev/full")
    assert type(error.value) is Exception


def test_a_refused_pickle_is_not_said_to_be_loaded_with_weights_only_false(tmp_path):
    folder = save_toy("encoder-decoder", tmp_path / "model")
    (folder / "model.safetensors").unlink()

    class Calls:
        def __reduce__(self):
            return os.getpid, ()

    torch.save({"shared.weight": Calls()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="have them written as safetensors") as refusal:
        pretrained_model(toy_args(folder), transformers.AutoTokenizer.from_pretrained(folder))
    assert "weights_only" not in str(refusal.value)
