"""Warnings about the text of a pre-training run."""

from types import SimpleNamespace

from lm_experiments_tools.recipes.common import warn_of_data


def test_validation_text_in_the_training_data_and_too_few_rows_are_warned_of(tmp_path, caplog):
    def warn(valid, rows):
        caplog.clear()
        args = SimpleNamespace(data_path=(f"{text}/",), valid_data_path=valid, batch_size=2, validate_only=False)
        warn_of_data(args, SimpleNamespace(train=SimpleNamespace(samples_per_epoch=rows)))
        return caplog.messages

    text = tmp_path / "text"
    seen, few = warn(str(text / "a.txt"), rows=1)
    assert str(text / "a.txt") in seen and f"{text}/" in seen and "fewer than --batch_size 2" in few
    assert not warn(str(tmp_path / "text2.txt"), rows=2) and not warn(None, rows=None)
