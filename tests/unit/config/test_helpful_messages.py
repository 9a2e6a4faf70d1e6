"""Messages for a newcomer's likely mistakes: each names what to write instead."""

import json

import pytest

import run_bert_pretraining
import run_finetuning
import run_t5_pretraining
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.helpers.runs import T5_RUN, refused, words, write_toys
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

BERT_RUN = {
    "data_path": "text.jsonl", "model_cfg": "bert.json", "model_cls": "transformers:BertForMaskedLM", "lr": 1e-3,
    "input_seq_len": 32, "batch_size": 4, "iters": 1, "backend": "local", "vocab_file": "vocab.txt",
}  # fmt: skip
T5 = {**T5_RUN, "vocab": "vocab.model"}


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_toys(tmp_path)
    numbered_words_vocabulary(tmp_path)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join([*tokens, *(f"token{i}" for i in range(40))]) + "\n")
    return tmp_path


def t5(**changed):
    run_t5_pretraining.main(words(**{**T5, **changed}))


def bert(**changed):
    run_bert_pretraining.main(words(**{**BERT_RUN, **changed}))


def finetune(**changed):
    flags = {"data_path": "text.jsonl", "task": "causal_lm", "model_type": "decoder", "from_pretrained": "run/last"}
    run_finetuning.main(words(**{**flags, **changed}))


def test_the_run_directory_of_another_script_is_named_as_such(work):
    t5(model_path="run")
    of_t5 = "run holds a run of run_t5_pretraining.py, which {} cannot continue: choose another --model_path"
    refused(bert, of_t5.format("run_bert_pretraining.py"), model_path="run", packing="documents")
    refused(finetune, of_t5.format("run_finetuning.py"), model_path="run")
    refused(t5, "which run_t5_pretraining.py cannot", model_path=str(of_script(work, "peft")), from_pretrained="run")


def of_script(work, setting):
    """A run directory whose recorded settings have a setting of one script, and the weights of run/last."""
    folder = work / "other"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "config.json").write_text(json.dumps({setting: 3, "from_pretrained": "run", "model_cls": None}))
    return folder


def test_a_whole_number_may_be_a_float_in_python():
    args = TrainerArgs(iters=1e1, save_interval=2e1, model_path="run", clip_grad_norm=1.0)
    assert repr((args.iters, args.save_interval, args.clip_grad_norm)) == "(10, 20, 1.0)"
    for value in (10.5, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"--iters is {value}: it must be a whole number"):
            TrainerArgs(iters=value)


def test_a_wrong_metric_is_refused_before_the_first_step(work, caplog):
    caplog.set_level("INFO")
    gives = "--optimize_metric accuracy: validation of this run gives loss, bits_per_byte"
    refused(t5, gives, valid_data_path="text.jsonl", optimize_metric="accuracy")
    assert "step 1/2" not in caplog.text
    t5(valid_data_path="text.jsonl", optimize_metric="bits_per_byte", model_path="good")
    generated = {"optimize_metric": "generation_accuracy", "optimize_mode": "max"}
    refused(t5, "--optimize_metric generation_accuracy: validation", valid_data_path="text.jsonl", **generated)
    t5(valid_data_path="text.jsonl", use_generate_on_valid=True, **generated)
    masks = {"packing": "documents", "valid_data_path": "text.jsonl"}
    refused(bert, "gives loss, loss_mlm, accuracy_mlm, bits_per_byte", optimize_metric="rouge", **masks)
    bert(optimize_metric="accuracy_mlm", optimize_mode="max", **masks)


def test_the_padding_of_the_tokenizer_is_taken_for_a_new_encoder_and_the_flag_named_for_weights(work, caplog):
    caplog.set_level("INFO")
    config = json.loads((work / "bert.json").read_text())
    (work / "padded.json").write_text(json.dumps({**config, "pad_token_id": 3}))
    bert(model_cfg="padded.json", packing="documents", model_path="run")
    assert "pad_token_id of the model is 0, that of the vocabulary (was 3)" in caplog.text
    saved = work / "run" / "last" / "config.json"
    assert json.loads(saved.read_text())["pad_token_id"] == 0
