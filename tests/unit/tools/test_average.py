"""`lmtools export --average`: the mean of checkpoints, against the closed form, loaded by transformers."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.export import ExportArgs, run
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


@pytest.fixture
def checkpoints(tmp_path):
    """Three models, and one of another size."""
    numbered_words_vocabulary(tmp_path).rename(tmp_path / "spiece.model")
    for number in range(4):
        torch.manual_seed(number)
        size = {"d_model": 16 if number == 3 else 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4}
        folder = tmp_path / f"step_{number}"
        T5ForConditionalGeneration(T5Config(vocab_size=220, decoder_start_token_id=0, **size)).save_pretrained(folder)
        (folder / "spiece.model").write_bytes((tmp_path / "spiece.model").read_bytes())
    return [str(tmp_path / f"step_{number}") for number in range(4)]


def weights(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()


def test_the_mean_of_three_checkpoints_loads_by_from_pretrained(checkpoints, tmp_path):
    first, *others = checkpoints[:3]
    run(ExportArgs(from_pretrained=first, average=tuple(others), to=str(tmp_path / "mean")))
    parts, mean = [weights(name) for name in (first, *others)], weights(tmp_path / "mean")
    for name, value in mean.items():
        expected = sum(part[name].double() for part in parts) / 3
        assert torch.equal(value, expected.float()), name
    assert "mean of 3 checkpoints" in (tmp_path / "mean" / "README.md").read_text()


def test_another_model_is_refused_and_nothing_is_written(checkpoints, tmp_path):
    with pytest.raises(UserError, match=r"--average .*step_3 is another model: shared"):
        run(ExportArgs(from_pretrained=checkpoints[0], average=(checkpoints[3],), to=str(tmp_path / "mean")))
    assert not (tmp_path / "mean").exists()
