"""How many bad lines are too many."""

import json

import pytest

from lm_experiments_tools.data.text.records import BadRecord, Record, RejectedRecords, converted
from lm_experiments_tools.data.tokens.indexed import dataset_exists
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import make_texts
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


def corpus(path, bad, count=1500):
    lines = [json.dumps({"text": text}) for text in make_texts(count)]
    for number in bad:
        lines[number] = '{"text": 5}'
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_tokenizing_goes_on_over_as_many_bad_lines_as_are_allowed(tmp_path):
    vocab = numbered_words_vocabulary(tmp_path)
    path = corpus(tmp_path / "spread.jsonl", range(100, 1500, 140))
    assert tokenize_corpus([path], vocab, tmp_path / "a", workers=1)["bad_lines"] == 10
    with pytest.raises(UserError, match="more than 9 bad lines: 10 so far"):
        tokenize_corpus([path], vocab, tmp_path / "b", workers=1, max_bad_lines=9)
    assert not dataset_exists(tmp_path / "b") and (tmp_path / "b.bad_lines.jsonl").is_file()


def test_rows_of_fine_tuning_have_the_same_limit():
    def convert(row):
        if row.value["bad"]:
            raise BadRecord("broken")
        return row.where

    def rejected(limit):
        return RejectedRecords(limit, of_rows=True)

    found = [Record({"bad": number % 150 == 149}, f"x:{number}", 0) for number in range(900)]
    assert len(list(converted(found, convert, rejected(6)))) == 894
    with pytest.raises(UserError, match=r"the first is x:149: broken: fix them or allow more with --max_bad_lines"):
        list(converted(found, convert, rejected(0)))
