"""A run reads its vocabulary and the records of its token files once each, its model's configuration once more for
--speed auto, which chooses before the workers meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.t5_sources import T5Sources
from tests.helpers.runs import GPT2, TINY
from tests.helpers.vocabulary_toys import numbered_words_vocabulary, train_vocabulary


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """Tokens `train` and `valid`, v.model and configurations, in the current folder."""
    monkeypatch.chdir(tmp_path)
    numbered_words_vocabulary(tmp_path).rename("v.model")
    text = "\n".join(json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(60))}) for i in range(60))
    Path("text.jsonl").write_text(text + "\n")
    for name in ("train", "valid"):
        tokenize_corpus(["text.jsonl"], "v.model", name, workers=1)
    for name, config in (("t5", TINY), ("gpt2", GPT2)):
        Path(f"{name}.json").write_text(json.dumps(config))
    return tmp_path


def sources(**changed) -> T5Sources:
    settings = {"data_path": ("train",), "vocab": "v.model", "model_cfg": "t5.json", "lr": 1.0, **changed}
    return T5Sources(T5PretrainingArgs(**settings))


def test_ensure_tokenized_takes_a_prefix_as_it_is_and_checks_its_vocabulary(work, caplog):
    paths = ("train", "train.bin", "train.idx")
    found = sources(data_path=paths)
    assert [found.tokens(path).prefix for path in paths] == ["train"] * 3 and not Path(".cache").exists()
    assert found.tokens("train") is found.tokens("train")
    train_vocabulary(work / "other.model", ["other words"] * 50, 50)
    with pytest.raises(UserError, match=r"tokens train were made with .*v\.model .*not with .*other\.model"):
        sources(vocab="other.model")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    Path("train.json").unlink()  # tokens of another program say nothing about their vocabulary
    whole = str(work / "train")  # a name of its own: a file is warned of once in a process
    for _ in range(2):
        assert sources(data_path=(whole,), vocab="other.model").tokens(whole).prefix == whole
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and warned[0].startswith(f"{whole}.json does not exist")


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_half_a_token_file_is_refused_before_the_vocabulary_is_read(work, missing):
    Path(f"train{missing}").unlink()
    with pytest.raises(UserError, match="without"):
        sources(vocab="no.model")


def test_paths_start_in_the_working_directory(work, monkeypatch):
    (work / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    found = sources(working_dir="..")
    monkeypatch.chdir(work)  # as the run does
    assert found.tokens("train").num_documents == 60 and found.vocabulary.path == work / "v.model"
    with pytest.raises(UserError, match="--working_dir nowhere is not a folder"):
        sources(working_dir="nowhere")


@pytest.mark.parametrize("changed", [{}, {"validate_only": True, "valid_data_path": "text.jsonl"}])
def test_the_vocabulary_that_the_tokens_record_is_taken_also_from_beside_them(work, changed):
    assert sources(vocab=None, **changed).vocabulary.path == work / "v.model"
    record = json.loads(Path("train.json").read_text())
    Path("train.json").write_text(json.dumps({**record, "vocab_file": "/nowhere/v.model"}))
    assert sources(vocab=None, **changed).vocabulary.path == Path("v.model")


@pytest.mark.parametrize(
    ("path", "record", "sentence"),
    [
        ("nowhere", None, "--data_path nowhere: there is neither a token prefix .* nor text"),
        ("text.jsonl", None, r"--vocab is missing, and text\.jsonl records none"),
        ("train", None, r"--vocab is missing, and the vocabulary of train\.json \(None\)"),
        ("train", {"vocab_file": "/no/x.model"}, r"the vocabulary of train\.json \(/no/x\.model\) is not"),
    ],
)
def test_a_vocabulary_that_nothing_names_is_one_sentence(work, path, record, sentence):
    Path("train.json").unlink() if record is None else Path("train.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=sentence):
        sources(data_path=(path,), vocab=None)
