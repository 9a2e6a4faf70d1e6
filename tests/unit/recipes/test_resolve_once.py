"""A run reads its vocabulary and the records of its token files once each, its model's configuration once more for
--speed auto, which chooses before the workers meet."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece

import run_bert_pretraining
import run_t5_pretraining
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.text.hf_tokenizer import HFTokenizer
from lm_experiments_tools.data.text.sentencepiece_tokenizer import SentencePieceTokenizer
from lm_experiments_tools.data.tokens import indexed
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import presets
from lm_experiments_tools.recipes import t5_sources
from lm_experiments_tools.recipes.t5_sources import T5Sources
from lm_experiments_tools.tools.main import main as lmtools
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.runs import GPT2, TINY
from tests.helpers.vocabulary_toys import numbered_words_vocabulary, train_vocabulary


@pytest.fixture
def counted(monkeypatch) -> Counter:
    """(what is read, name of the file) -> times."""
    counts: Counter = Counter()

    def count(owner, name: str, what: str) -> None:
        real = getattr(owner, name)

        def counting(first, *args, **options):
            path = first if isinstance(first, str | Path) else getattr(args[0], "name", args[0])
            counts[what, Path(path).name] += 1
            return real(first, *args, **options)

        monkeypatch.setattr(owner, name, counting)

    for module in (indexed, t5_sources):
        count(module, "read_meta", "record")
    count(IndexedDataset, "__init__", "index")
    count(SentencePieceTokenizer, "__init__", "vocabulary")
    count(presets, "read_model_config", "configuration")
    count(HFTokenizer, "__init__", "vocabulary")
    return counts


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


T5 = (
    "--data_path train --valid_data_path valid --model_path run --input_seq_len 32 --batch_size 4 --lr 1e-3 "
    "--iters 2 --log_interval 1 --backend local --report"
)


@pytest.mark.parametrize(
    "flags",
    [
        "--model_cfg t5.json --target_seq_len 16",  # the vocabulary that the tokens record
        "--vocab v.model --model_cfg gpt2.json --task causal_lm --model_cls transformers:GPT2LMHeadModel",
    ],
)
def test_a_start_of_t5_reads_each_file_once(work, counted, monkeypatch, flags):
    processors = []
    real = sentencepiece.SentencePieceProcessor
    monkeypatch.setattr(sentencepiece, "SentencePieceProcessor", lambda **of: processors.append(of) or real(**of))
    run_t5_pretraining.main(f"{T5} {flags}".split())
    configuration = "gpt2.json" if "gpt2" in flags else "t5.json"
    once = [("vocabulary", "v.model")]
    once += [(what, name) for what in ("record", "index") for name in ("train", "valid")]
    assert {key: times for key, times in counted.items() if key in once} == dict.fromkeys(once, 1)
    assert counted["configuration", configuration] == 2
    assert len(processors) == 1 and Path("run/report.txt").exists()


def test_tokenizing_raw_text_parses_the_vocabulary_no_second_time(work, counted, monkeypatch):
    processors = []
    real = sentencepiece.SentencePieceProcessor
    monkeypatch.setattr(sentencepiece, "SentencePieceProcessor", lambda **of: processors.append(of) or real(**of))
    flags = "--vocab v.model --model_cfg t5.json --target_seq_len 16 --data_n_workers 1 --data_pipeline native"
    run_t5_pretraining.main(f"{T5.replace('--data_path train', '--data_path text.jsonl')} {flags}".split())
    assert len(processors) == 1 and counted["vocabulary", "v.model"] == 1


def test_a_start_of_bert_reads_each_file_once(tmp_path, monkeypatch, counted):
    monkeypatch.chdir(tmp_path)
    make_bert_data(tmp_path)
    counted.clear()
    flags = T5.replace("--input_seq_len 32", "--input_seq_len 48 --vocab_file vocab.txt --model_cfg tiny.json")
    run_bert_pretraining.main(flags.split())
    once = [("vocabulary", "vocab.txt")]
    once += [(what, name) for what in ("record", "index") for name in ("train", "valid")]
    assert {key: times for key, times in counted.items() if key in once} == dict.fromkeys(once, 1)
    assert counted["configuration", "tiny.json"] == 2


@pytest.mark.parametrize("command", ["inspect pretrain-t5", "inspect pretrain-bert"])
def test_looking_at_data_opens_it_once(tmp_path, monkeypatch, counted, command, request):
    if command == "inspect pretrain-t5":
        request.getfixturevalue("work")
        flags = "--vocab v.model"
    else:
        monkeypatch.chdir(tmp_path)
        make_bert_data(tmp_path)
        flags = "--vocab_file vocab.txt"
    counted.clear()
    assert lmtools(f"{command} --data_path train --input_seq_len 32 {flags}".split()) == 0
    for key in (("record", "train"), ("index", "train"), ("vocabulary", flags.split()[1])):
        assert counted[key] == 1


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


def test_with_validate_only_no_training_data_is_read(work, counted):
    settings = {"data_path": ("train",), "valid_data_path": "valid", "validate_only": True, "vocab": "v.model"}
    args = T5PretrainingArgs(**settings, init_checkpoint="run", model_cfg="t5.json", lr=1.0)
    T5Sources(args)
    assert counted["record", "valid"] == 1 and counted["record", "train"] == 0


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
        ("train", {}, r"--vocab is missing, and the vocabulary of train\.json \(None\)"),
        (
            "train",
            {"vocab_file": "/no/x.model"},
            r"the vocabulary of train\.json \(/no/x\.model\) is not",
        ),
        ("train", [1], r"train\.json"),
    ],
)
def test_a_vocabulary_that_nothing_names_is_one_sentence(work, path, record, sentence):
    Path("train.json").unlink() if record is None else Path("train.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=sentence):
        sources(data_path=(path,), vocab=None)
