"""The documentation corpus: what counts as prose, what a small installation gives, and the vocabulary made from it."""

import json
from collections import Counter

import pytest
import sentencepiece

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools import corpus
from lm_experiments_tools.tools.corpus import paragraphs
from lm_experiments_tools.tools.train_vocabulary import train_vocab

DOCSTRING = """Return the mean of the values, ignoring what is missing.

The `values` are read **once**, so that an iterator of :class:`~collections.abc.Iterator` type
is accepted; see [the guide](https://example.org/guide) or :ref:`the notes <stats-notes>` for more.

    indented = code()

Args:
    values (`list[float]`, *optional*):
        The numbers whose mean is wanted, in any order that you like.
    axis: The axis along which the means are to be taken.
    dtype : str

Parameters
----------
weights : array_like
    An array of weights that are associated with the values in it.

.. code-block:: python

    The code in this block is not a sentence that anyone reads.

.. note:: The result is a float, even when all of the values are integers.

>>> mean([1, 2])
1.5

For example, this is how it is used with a list of numbers::

    The literal block follows the two colons and is left out of it.

| a table | of things | is not prose, even though it is long. |

* The first item of the list is a whole sentence,
  which goes on in the next line.
* short

Copyright 2020 by the authors, and all of the rights are reserved.
"""

PROSE = [
    "Return the mean of the values, ignoring what is missing.",
    "The values are read once, so that an iterator of Iterator type is accepted; see the guide or the notes for more.",
    "The numbers whose mean is wanted, in any order that you like.",
    "The axis along which the means are to be taken.",
    "An array of weights that are associated with the values in it.",
    "The result is a float, even when all of the values are integers.",
    "The first item of the list is a whole sentence, which goes on in the next line.",
]


def test_prose_of_a_docstring_and_nothing_else():
    assert list(paragraphs(DOCSTRING)) == PROSE


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A Python installation of a few packages; importing any of them would be noticed."""
    stdlib, site = tmp_path / "stdlib", tmp_path / "site"
    sentence = "The {} of number {} is a thing that is described in some words here, with {} in it."
    nouns = ["reader", "writer", "parser", "server", "client", "window", "buffer", "editor", "folder", "module"]
    verbs = ["asking", "giving", "taking", "making", "seeing", "hiding", "moving", "adding", "ending", "timing"]

    def docs(start, count):
        return [
            sentence.format(nouns[i % 10], i, f"{verbs[i // 10 % 10]} {nouns[i // 100 % 10]}s")
            for i in range(start, start + count)
        ]

    def source(start, count):
        functions = "".join(f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(docs(start, count)))
        return f'"""{sentence.format("module", start, "import")}"""\nraise SystemError("imported")\n' + functions

    def put(root, name, text):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    put(stdlib, "pydoc_data/topics.py", f"topics = {{'a': {docs(0, 1)[0]!r}}}")
    for i in range(8):
        put(stdlib, f"mod{i}.py", source(100 * i, 60))
    put(site, "pkg/broken.py", '"""' + "x " * 999 + '"""\ndef (:\n')
    put(site, "pkg/latin.py", b'"""caf\xe9' + b" x" * 999 + b'"""')
    put(site, "pkg/tests/test_x.py", source(900, 60))
    put(site, "pkg/guide.rst", "\n\n".join(docs(960, 30)))
    put(site, "pkg/LICENSE.txt", "\n\n".join(docs(990, 10)))
    put(site, "pkg/more.md", "\n\n".join(docs(970, 25)))
    paths = {"stdlib": str(stdlib), "purelib": str(site), "platlib": str(site)}
    monkeypatch.setattr(corpus.sysconfig, "get_path", paths.__getitem__)
    monkeypatch.setattr(corpus, "VALIDATION_SHARE", 0.4)  # the files are few
    monkeypatch.setattr(corpus, "MAX_KNOWN", 1.0)  # all sentences are of one pattern
    return tmp_path


def build(folder, max_megabytes=20.0):
    corpus.run(corpus.CorpusArgs(output=str(folder), max_megabytes=max_megabytes))


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_corpus_of_a_small_installation(installation, tmp_path, capsys):
    build(tmp_path / "out")
    train, valid = read(tmp_path / "out" / "train.jsonl"), read(tmp_path / "out" / "valid.jsonl")
    assert f"train.jsonl: {len(train)} documents" in capsys.readouterr().out
    sources = {row["source"] for row in train + valid}
    assert {"mod0.py", "pkg/guide.rst"} <= sources
    assert not any("test" in source or "LICENSE" in source or "broken" in source for source in sources)
    counts = Counter(line for row in train + valid for line in row["text"].split("\n"))
    assert set(counts.values()) == {1}
    assert any("number 994" in line for line in counts) and not any("number 999" in line for line in counts)


def runs(paragraph):
    words = paragraph.lower().split()
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


def test_held_out_files_are_whole_and_say_nothing_that_training_text_says(installation, tmp_path, monkeypatch):
    build(tmp_path / "out")
    train, valid = ({row["source"] for row in read(tmp_path / "out" / f"{name}.jsonl")} for name in ("train", "valid"))
    assert train and valid and not train & valid
    monkeypatch.setattr(corpus, "MAX_KNOWN", 0.2)
    words = [f"{'abcdefghij'[i // 10 % 10]}{'klmnopqrst'[i % 10]}ling" for i in range(100)]
    for number in range(12):
        own = [f"The {w} of the {words[(i + number) % 100]} is a {words[i * 7 % 100]} that is in it." for i, w in
               enumerate(words[8 * number : 8 * number + 8])]  # fmt: skip
        copied = (
            f"As it was said before, this {words[number]} is one of many that are there for all to see and to use."
        )
        (installation / "stdlib" / f"copy{number}.py").write_text(f'"""{" ".join(own)}\n\n{copied}"""\n')
    build(tmp_path / "copies")
    train, valid = (read(tmp_path / "copies" / f"{name}.jsonl") for name in ("train", "valid"))
    known = {run for row in train for paragraph in row["text"].split("\n") for run in runs(paragraph)}
    paragraphs_of = [paragraph for row in valid for paragraph in row["text"].split("\n")]
    assert paragraphs_of and all(len(runs(p) & known) < 0.2 * len(runs(p)) for p in paragraphs_of)
    assert sum("As it was said before" in row["text"] for row in train + valid) == 1


def test_corpus_is_the_same_again_and_nothing_moves_between_the_sets(installation, tmp_path):
    build(tmp_path / "a")
    build(tmp_path / "b")
    for name in ("train.jsonl", "valid.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    build(tmp_path / "b", max_megabytes=0.032)  # over its own
    whole, part = ([{r["text"] for r in read(tmp_path / x / f"{s}.jsonl")} for s in ("train", "valid")] for x in "ab")
    assert part[0] < whole[0] and part[1] <= whole[1]


def test_corpus_refuses_what_is_not_its_own(installation, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text("precious")
    with pytest.raises(UserError, match=r"train\.jsonl was not made by `lmtools corpus`"):
        build(tmp_path / "mine")
    assert (tmp_path / "mine" / "train.jsonl").read_text() == "precious"


def test_vocabulary_has_t5s_layout_exact_size_and_is_the_same_again(installation, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "VALIDATION_SHARE", 0.3)
    build(tmp_path / "out")
    first = train_vocab([str(tmp_path / "out" / "train.jsonl")], 200, tmp_path / "a.model")
    again = train_vocab([str(tmp_path / "out" / "train.jsonl")], 200, tmp_path / "b.model")
    assert first.fingerprint == again.fingerprint and first.size == 200
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert len(processor) == 200
    assert [processor.id_to_piece(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert [processor.id_to_piece(199 - k) for k in range(100)] == [f"<extra_id_{k}>" for k in range(100)]
    assert (processor.bos_id(), processor.eos_id(), processor.pad_id(), processor.unk_id()) == (-1, 1, 0, 2)
    vocabulary = Tokenizer.load(tmp_path / "a.model")
    assert vocabulary.sentinel_ids.tolist() == list(range(199, 99, -1))
    text = "The parser of number 12 is here, with a thing in it."
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.encode("of\nnumber") == vocabulary.encode("of number")


def test_vocabulary_that_does_not_fit_its_text_is_one_sentence(tmp_path):
    data = tmp_path / "d.txt"
    data.write_text("a few words of text\n" * 20)
    for size, message in [(32000, "at most"), (110, "at least")]:
        with pytest.raises(
            UserError, match=rf"{size - 100} subwords and 100 sentinels .* give --size {message} \d+"
        ) as e:
            train_vocab([str(data)], size, tmp_path / "v.model")
        limit = int(str(e.value).split()[-1])
        assert train_vocab([str(data)], limit, tmp_path / "limit.model").size == limit
        with pytest.raises(UserError):
            train_vocab([str(data)], limit + (1 if size > limit else -1), tmp_path / "v.model")
    with pytest.raises(UserError, match="give a larger size"):
        train_vocab([str(data)], 103, tmp_path / "v.model")
    data.write_text("\n\n")
    with pytest.raises(UserError, match=r"no document in .*d\.txt"):
        train_vocab([str(data)], 200, tmp_path / "v.model")
    assert not (tmp_path / "v.model").exists()
