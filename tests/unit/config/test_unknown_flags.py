"""Flags that do not exist, and what is said of them."""

import pytest

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.suggestions import SYNONYMS, suggestion

SCRIPTS = (T5PretrainingArgs, BertPretrainingArgs, FinetuningArgs)


def test_every_name_of_another_program_leads_to_a_flag_of_some_script():
    known = {name for script in SCRIPTS for name in script.__dataclass_fields__}
    assert SYNONYMS.keys() - known == set()


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_argument_of_transformers_scripts_is_answered_by_a_guess(script):
    """A guess ("did you mean --model_path?" for --model_name_or_path) would name a flag of another meaning."""
    transformers = pytest.importorskip("transformers")
    others = set(transformers.Seq2SeqTrainingArguments.__dataclass_fields__)
    others |= {
        "config_name", "dataset_config_name", "dataset_name", "do_eval", "do_train", "evaluation_strategy",
        "group_by_length", "max_seq_length", "max_source_length", "model_name_or_path", "model_type", "no_cuda",
        "overwrite_output_dir", "preprocessing_num_workers", "source_lang", "task_name", "text_column",
        "tokenizer_name", "torch_dtype", "train_file", "use_lora", "validation_file", "warmup_ratio",
    }  # fmt: skip
    names = script.__dataclass_fields__
    guesses = {name: said for name in others - names.keys() if "did you mean" in (said := suggestion(name, names))}
    assert guesses == {}
