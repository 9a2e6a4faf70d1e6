"""run_t5_pretraining.py with vocabularies that are not SentencePiece's: trained, resumed, read by AutoTokenizer."""

import json

import pytest
from transformers import AutoTokenizer

from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.main import main as lmtools
from run_t5_pretraining import main
from tests.helpers.runs import T5_RUN, losses, words
from tests.helpers.tokenizer_toys import TEXTS, byte_fallback_tokenizer, byte_level_tokenizer
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

T5 = {
    "model_type": "t5", "vocab_size": 640, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1,
    "num_decoder_layers": 1, "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
BERT = {
    "vocab_size": 640, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, config in (("t5", T5), ("bert", BERT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return tmp_path


def start(vocab, **changed):
    lengths = {"input_seq_len": 64, "target_seq_len": 64}
    main(words(**{**T5_RUN, **lengths, "vocab": vocab, "model_path": "run", "model_cfg": "t5.json", **changed}))


OF_BERT = {
    "task": "mlm", "target_seq_len": None, "model_cls": "transformers:BertForMaskedLM", "model_cfg": "bert.json",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("tokenizer.json", OF_BERT),
        ("folder", {"task": "ul2"}),
        ("bytes", {"task": "span_corruption", "streaming": True, "streams": 1}),
    ],
)
def test_a_run_trains_saves_its_tokenizer_and_goes_on_from_it(work, kind, flags):
    folder = byte_fallback_tokenizer(work / "gemma") if kind == "folder" else None
    vocab = {"tokenizer.json": byte_level_tokenizer(work / "own.json"), "folder": folder, "bytes": "bytes"}[kind]
    start(vocab, iters=4, model_path="whole", **flags)
    start(vocab, **flags)
    last = work / "run" / "last"
    vocabulary = Tokenizer.load(vocab)
    assert len(AutoTokenizer.from_pretrained(last)) == vocabulary.size
    assert Tokenizer.load(last).fingerprint == vocabulary.fingerprint
    start(last, iters=4, **flags)  # the vocabulary is the same, by its ids
    assert losses("run") == losses("whole")


def test_tokens_are_read_and_looked_at_with_the_vocabulary_they_record(work, capsys):
    command = ["tokenize", "--input", "text.jsonl", "--vocab", "bytes", "--output", "t", "--workers", "1"]
    assert lmtools(command) == 0 and json.loads((work / "t.json").read_text())["vocab_file"] == "bytes"
    start(None, data_path="t", valid_data_path="t", report=True, task="span_corruption", valid_samples=8)
    report = (work / "run" / "report.txt").read_text()
    assert "held-out example 1" in report and "ïve word" in report  # the rest is masked
    start(None, data_path=None, valid_data_path="t", task="span_corruption", valid_samples=8, validate_only=True)
    capsys.readouterr()
    flags = words(data_path="t", task="span_corruption", input_seq_len=64, target_seq_len=64, batch_size=2)
    assert lmtools(["inspect", *flags]) == 0 and "<extra_id_0>" in capsys.readouterr().out


def test_what_a_tokenizer_cannot_do_is_refused_before_anything_is_tokenized(work):
    def refused(sentence, vocab, **changed):
        with pytest.raises(UserError, match=sentence) as error:
            start(vocab, **changed)
        assert "\n" not in str(error.value) and not (work / ".cache").exists()

    plain = byte_level_tokenizer(work / "plain.json", special=("</s>", "<pad>"))
    refused("nor <mask> nor a sentinel", plain, **OF_BERT)
    refused("but the vocabulary has 0 sentinels", plain)
    refused("cannot be loaded", work / "t5.json")
    (work / "small.json").write_text(json.dumps({**T5, "vocab_size": 383}))
    refused("has 384 ids but the model's embedding only 383 rows", "bytes", model_cfg="small.json")
    model = numbered_words_vocabulary(work)
    assert (
        lmtools(["tokenize", "--input", "text.jsonl", "--vocab", str(model), "--output", "t", "--workers", "1"]) == 0
    )
    refused("were made with the vocabulary", "bytes", data_path="t")
