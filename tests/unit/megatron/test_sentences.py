"""Sentence splitters: they cover the text whatever they are, and refuse what changes it."""

import pytest

from lm_experiments_tools.errors import UserError
from megatron.sentences import SentenceSplitter

NOT_A_FUNCTION = ["a", "list"]


def upper(text):
    return [text.upper()]


def drops_the_end(text):
    return [text.split()[0]]


def words(text):
    return text.split()


def numbers(text):
    return [1]


@pytest.mark.parametrize("name", ["nupunkt", "sentencex", "sentencex:de", "newline", f"{__name__}:words"])
def test_sentences_cover_the_text_whatever_the_splitter(name):
    strip, keep = SentenceSplitter(name), SentenceSplitter(name, keep_newlines=True)
    texts = [
        "",
        " \n ",
        "One. Two\ngoes on.\n\nThree",
        "\n\n a\r\n\r\nb ",
        "Dr. No? \u201cYes!\u201d\u3000Oui.\n",
        "x",
    ]
    for text in texts * 2:  # twice: a splitter remembers nothing
        spans = keep.spans(text)
        if not text.strip():
            assert spans == [] and strip(text) == keep(text) == []
            continue
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == len(text)
        assert "".join(keep(text)) == text and [part.strip() for part in keep(text)] == strip(text)
        assert all(strip(text))


def test_newlines_are_kept_with_the_sentence_they_follow_or_nowhere():
    text = "One. Two\ngoes on.\n\nThree"
    assert SentenceSplitter()(text) == ["One.", "Two\ngoes on.", "Three"]
    assert SentenceSplitter(keep_newlines=True)(text) == ["One. ", "Two\ngoes on.\n\n", "Three"]
    assert SentenceSplitter("newline")(text) == ["One. Two", "goes on.", "Three"]
    assert SentenceSplitter("newline", keep_newlines=True)("\na\n\nb\n") == ["\na\n\n", "b\n"]


def test_a_splitter_that_does_not_exist_or_changes_the_text_is_one_sentence():
    for name, message in [
        ("punkt", "is neither nupunkt, sentencex, newline nor module:callable"),
        ("no_such_module:f", r"module no_such_module cannot be imported \(No module named 'no_such_module'\)"),
        (f"{__name__}:f", f"{__name__} has no f"),
        (f"{__name__}:NOT_A_FUNCTION", r"is \[.*\], which cannot be called"),
    ]:
        with pytest.raises(UserError, match=message):
            SentenceSplitter(name)
    for function, message in [
        (upper, "changed the text: its sentence 1, 'ONE TWO', does not follow ''"),
        (drops_the_end, "lost the end of a text: 'two'"),
        (numbers, "returned a int as a sentence"),
    ]:
        with pytest.raises(UserError, match=message):
            SentenceSplitter(f"{__name__}:{function.__name__}")("one two")


def test_a_text_on_which_a_splitter_panics_is_refused(monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(language, text):
        raise PanicException("byte index 30 is not a char boundary")

    monkeypatch.setattr("sentencex.segment", panics)
    with pytest.raises(UserError, match="sentencex fails on the text: byte index 30"):
        SentenceSplitter("sentencex")("text")
