"""How many bad lines are too many: a number that was asked for, else a rate of what was read."""

import json

import pytest

from lm_experiments_tools.data.text import records as module
from lm_experiments_tools.data.text.records import (
    BadRecord,
    Record,
    RejectedRecords,
    TooManyRejected,
    allowed,
    converted,
)
from lm_experiments_tools.data.tokens.indexed import dataset_exists
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import make_texts
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


@pytest.mark.parametrize(
    ("limit", "lines", "number"),
    [(None, 5, 100), (None, 100_000, 100), (None, 365_000_000, 365_000), (7, 365_000_000, 7), (0, 5, 0)],
)
def test_the_limit_is_a_rate_unless_a_number_was_asked_for(limit, lines, number):
    assert allowed(limit, lines) == number


def test_lines_are_allowed_by_what_was_read_before_them():
    bad = RejectedRecords(None)
    for number in range(100):
        bad.add(f"a:{number}", "broken")
    with pytest.raises(UserError, match=r"more than 100 bad lines, and than 0.1 % of the 101 lines read: 101 so far"):
        bad.add("a:100", "broken")
    bad.accept(1_000_000)
    for number in range(899):
        bad.add(f"b:{number}", "broken")
    with pytest.raises(UserError, match=r"more than 1001 bad lines, and than 0.1 % of the 1,001,"):
        for number in range(200):
            bad.add(f"c:{number}", "broken")


@pytest.mark.parametrize(
    ("limit", "good", "most"), [(None, 0, 10_000), (None, 20_002, 20_002), (None, 19_999, 19_999), (3, 999_996, 3)]
)
def test_a_part_is_given_up_only_where_most_of_very_many_lines_are_bad(limit, good, most):
    bad = RejectedRecords(limit, of_part=True)
    bad.accept(good)
    for number in range(most):
        bad.add(f"a:{number}", "broken")
    with pytest.raises(TooManyRejected, match=rf": {most + 1} so far, the first is a:0: broken$"):
        bad.add("a", "broken")


@pytest.fixture
def strict(monkeypatch):
    """The same rule for small texts: 2 bad lines, or one in 100."""
    monkeypatch.setattr(module, "_MIN_ALLOWED", 2)
    monkeypatch.setattr(module, "_LINES_PER_REJECTED", 100)


def corpus(path, bad, count=1500):
    lines = [json.dumps({"text": text}) for text in make_texts(count)]
    for number in bad:
        lines[number] = '{"text": 5}'
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_tokenizing_a_large_text_goes_on_over_a_small_share_of_bad_lines(tmp_path, strict):
    vocab = numbered_words_vocabulary(tmp_path)
    spread = corpus(tmp_path / "spread.jsonl", range(100, 1500, 140))
    assert tokenize_corpus([spread], vocab, tmp_path / "a", workers=1)["bad_lines"] == 10
    many = corpus(tmp_path / "many.jsonl", range(100, 1500, 70))
    with pytest.raises(UserError, match=r"more than 14 bad lines, and than 0.1 % .* lines read: 15 so far"):
        tokenize_corpus([many], vocab, tmp_path / "b", workers=1)
    assert not dataset_exists(tmp_path / "b") and (tmp_path / "b.bad_lines.jsonl").is_file()
    with pytest.raises(UserError, match="more than 9 bad lines: 10 so far"):
        tokenize_corpus([spread], vocab, tmp_path / "c", workers=1, max_bad_lines=9)


def test_a_piece_of_nothing_but_bad_lines_ends_the_work_before_it_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MIN_HOPELESS", 50)
    path = corpus(tmp_path / "d.jsonl", range(1500))
    with pytest.raises(UserError, match=r"most lines of .*d\.jsonl are bad: 51 bad lines left out"):
        tokenize_corpus([path], numbered_words_vocabulary(tmp_path), tmp_path / "t", workers=1)


def test_rows_of_fine_tuning_know_the_same_rate(strict):
    def convert(row):
        if row.value["bad"]:
            raise BadRecord("broken")
        return row.where

    def rejected(limit):
        return RejectedRecords(limit, of_rows=True)

    found = [Record({"bad": number % 150 == 149}, f"x:{number}", 0) for number in range(900)]
    assert len(list(converted(found, convert, rejected(None)))) == 894
    with pytest.raises(UserError, match=r"more than 2 bad lines.*: 3 so far, the first is x:0: broken"):
        list(converted([Record({"bad": True}, f"x:{number}", 0) for number in range(9)], convert, rejected(None)))
    with pytest.raises(UserError, match=r"the first is x:149: broken: fix them or allow more with --max_bad_lines"):
        list(converted(found, convert, rejected(0)))
