"""Messages for a newcomer's likely mistakes: each names what to write instead."""

import json

import pytest

import run_bert_pretraining
import run_finetuning
import run_t5_pretraining
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.suggestions import suggestion
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import load_model_config
from lm_experiments_tools.recipes.finetuner import FineTuner
from lm_experiments_tools.recipes.pretrainer import PreTrainer
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


def test_text_for_a_number_is_refused_by_the_name_of_the_setting():
    with pytest.raises(UserError, match="--batch_size is '8': it must be a whole number"):
        FineTuner("t5-small", batch_size="8")
    with pytest.raises(UserError, match="--lr is '1e-3': it must be a number"):
        T5PretrainingArgs(data_path=("a",), model_cfg="t5-small", lr="1e-3")


def test_a_whole_number_may_be_a_float_in_python():
    args = TrainerArgs(iters=1e1, save_interval=2e1, model_path="run", clip_grad_norm=1.0)
    assert repr((args.iters, args.save_interval, args.clip_grad_norm)) == "(10, 20, 1.0)"
    for value in (10.5, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"--iters is {value}: it must be a whole number"):
            TrainerArgs(iters=value)


@pytest.mark.parametrize(
    "name, ours", [("output_dir", "model_path"), ("max_steps", "iters"), ("save_steps", "save_interval")]
)
def test_an_argument_of_hf_trainer_leads_to_ours_in_python(name, ours):
    with pytest.raises(UserError, match=f"TrainerArgs has no argument '{name}': here it is called {ours}"):
        TrainerArgs(**{name: 1})


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


def test_the_nearest_preset_is_one_of_the_same_kind():
    with pytest.raises(UserError) as error:
        load_model_config("t5-tiny")
    assert "t5-tiny" in str(error.value) and "bert" not in str(error.value) and "t5-" in str(error.value)


def test_a_share_of_the_data_for_validation_leads_to_validation_data():
    known = T5PretrainingArgs.__dataclass_fields__
    assert suggestion("val_set_size", known, "--") == ": here it is called --valid_fraction."
    known = FinetuningArgs.__dataclass_fields__
    assert suggestion("val_set_size", known, "--") == ": name a file of its own by --valid_data_path."


@pytest.mark.parametrize("make", [FineTuner, PreTrainer])
@pytest.mark.parametrize(
    ("name", "instead"),
    [("steps", "here it is called iters"), ("device", "set CUDA_VISIBLE_DEVICES"), ("xyzzy", "the script's --help")],
)
def test_a_wrong_keyword_leads_to_what_python_takes(make, name, instead):
    with pytest.raises(UserError, match=f"has no setting '{name}': {instead}"):
        make("t5-small", **{name: 1})


def test_a_fraction_of_warm_up_leads_to_its_own_flag(work):
    refused(t5, "--num_warmup_steps takes .*--warmup_ratio.*, not '0.2'", num_warmup_steps=0.2)
    with pytest.raises(UserError, match=r"--num_warmup_steps is 0.2: .*--warmup_ratio"):
        TrainerArgs(num_warmup_steps=0.2)


def test_unknown_tokens_lead_to_the_coverage_of_the_vocabulary(work, caplog):
    (work / "other.txt").write_text("\u4f60\u597d " * 200)
    t5(data_path="other.txt")
    assert "are unknown tokens" in caplog.text and "--character_coverage" in caplog.text
