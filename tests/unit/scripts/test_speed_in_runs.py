"""Runs with --speed auto: transformers reads what they save, fine-tuning goes on from it, compiled blocks serve every
objective."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import modeling_bert
import modeling_t5
import run_bert_pretraining
import run_finetuning
import run_t5_pretraining
from tests.helpers.bert_toys import make_bert_data
from tests.helpers.finetuning_toys import pairs, write_json
from tests.helpers.runs import T5_RUN, TINY, words, write_toys
from tests.helpers.vocabulary_toys import numbered_words_vocabulary


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with text and configurations, one of T5 1.1, as the current one."""
    monkeypatch.chdir(tmp_path)
    numbered_words_vocabulary(tmp_path)
    write_toys(tmp_path)
    Path("t5.json").write_text(json.dumps({**TINY, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}))
    return tmp_path


SETTINGS = {"lr": 1e-3, "iters": 2, "log_interval": 1, "backend": "local", "batch_size": 4}
T5 = {**T5_RUN, "vocab": "vocab.model", "model_cfg": "t5.json"}


def settings(run):
    return json.loads(Path(run, "config.json").read_text())


def test_transformers_reads_a_t5_of_auto_and_fine_tuning_goes_on_from_it(work, caplog):
    caplog.set_level("INFO")
    run_t5_pretraining.main(words(model_path="run", **T5))
    assert settings("run")["model_cls"] == "modeling_t5:T5ForConditionalGeneration"
    assert "auto: our T5ForConditionalGeneration" in caplog.text and "--speed off: none of these" in caplog.text
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained("run/last").eval()
    ours = modeling_t5.T5ForConditionalGeneration.from_pretrained("run/last").eval()
    assert type(theirs) is transformers.T5ForConditionalGeneration
    inputs = {"input_ids": torch.randint(2, 100, (2, 9)), "decoder_input_ids": torch.randint(2, 100, (2, 5))}
    torch.testing.assert_close(theirs(**inputs).logits, ours(**inputs).logits)

    write_json(work / "pairs.jsonl", pairs(8))
    flags = {**SETTINGS, "data_path": "pairs.jsonl", "input_seq_len": 16, "target_seq_len": 8}
    run_finetuning.main(words(from_pretrained="run", model_path="tuned", **flags))
    assert settings("tuned")["model_cls"] == "modeling_t5:T5ForConditionalGeneration"
    run_finetuning.main(words(from_pretrained="run", model_path="tuned", **{**flags, "iters": 3}))  # goes on
    assert settings("tuned")["speed"] == "auto"
    assert type(transformers.AutoModelForSeq2SeqLM.from_pretrained("tuned/last")) is type(theirs)


def test_transformers_reads_a_bert_of_auto(work):
    make_bert_data(work)
    flags = {**SETTINGS, "data_path": "train", "vocab_file": "vocab.txt", "model_cfg": "tiny.json"}
    run_bert_pretraining.main(words(model_path="run", input_seq_len=48, **flags))
    assert settings("run")["model_cls"] == "modeling_bert:BertForPreTraining"
    theirs = transformers.AutoModelForPreTraining.from_pretrained("run/last").eval()
    ours = modeling_bert.BertForPreTraining.from_pretrained("run/last").eval()
    assert type(theirs) is transformers.BertForPreTraining
    inputs = {"input_ids": torch.randint(2, 100, (2, 9))}
    for name in ("prediction_logits", "seq_relationship_logits"):
        torch.testing.assert_close(theirs(**inputs)[name], ours(**inputs)[name])
