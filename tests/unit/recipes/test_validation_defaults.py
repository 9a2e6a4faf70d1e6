"""How often pre-training validates, and how many examples, if no flag says so."""

from __future__ import annotations

import pytest

from lm_experiments_tools.data.loader import ValidLoader
from lm_experiments_tools.recipes import recipe
from run_t5_pretraining import main
from tests.helpers.runs import T5_RUN, records, words, write_toys
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

RUN = {**T5_RUN, "valid_data_path": "text.jsonl", "model_path": "run", "log_interval": 10, "vocab": "vocab.model"}


def start(**changed):
    main(words(**{**RUN, **changed}))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The numbers of the validation samples that are made, in order."""
    monkeypatch.chdir(tmp_path)
    write_toys(tmp_path)
    numbered_words_vocabulary(tmp_path)
    numbers, make = [], ValidLoader._make

    def noting(self, number):
        batch = make(self, number)
        numbers.append(len(batch["labels"]))
        return batch

    monkeypatch.setattr(ValidLoader, "_make", noting)
    return numbers


def test_validation_reads_at_most_one_example_for_twenty_and_a_restart_keeps_its_steps(made, monkeypatch, caplog):
    monkeypatch.setattr(recipe, "VALID_SAMPLES", 10)
    caplog.set_level("INFO")
    # 10 examples are 3 batches of 4, so a validation is due each 60 steps.
    start(iters=70)
    start(iters=120)
    assert caplog.text.count("validation every 60 steps, of 3 batches: at most 5 % of") == 2
    assert [line["step"] for line in records("run", "valid")] == [60, 70, 120]
    # The end of each start has a validation of its own, whatever the interval.
    assert sum(made) == 3 * 10 and 2 * 10 <= 0.05 * 120 * 4


def test_a_short_run_is_validated_in_its_middle_if_that_is_cheap(made, monkeypatch, caplog):
    monkeypatch.setattr(recipe, "VALID_SAMPLES", 10)
    caplog.set_level("INFO")
    start(iters=25)
    assert [line["step"] for line in records("run", "valid")] == [13, 25]
    assert "validation every 13 steps, of 3 batches: at most 5 % of the time" in caplog.text
    start(iters=19, model_path="shorter")  # 3 of 19 batches without a backward pass: 5.3 %
    assert [line["step"] for line in records("shorter", "valid")] == [19]


def test_the_number_of_examples_is_limited_and_a_flag_overrides_it(made):
    start(iters=1)
    assert sum(made) == min(recipe.VALID_SAMPLES, 198)
    made.clear()
    start(iters=2, valid_samples=6)
    assert sum(made) == 6


def test_a_single_validation_reads_all(made, monkeypatch):
    monkeypatch.setattr(recipe, "VALID_SAMPLES", 10)
    start(iters=1)
    made.clear()
    start(validate_only=True)
    assert sum(made) > 100


def test_an_interval_that_is_given_stays(made, monkeypatch):
    monkeypatch.setattr(recipe, "VALID_SAMPLES", 10)
    start(iters=6, valid_interval=2)
    assert [line["step"] for line in records("run", "valid")] == [2, 4, 6]
