"""Flags that do not exist, and what is said of them."""

import pytest

from lm_experiments_tools.config import cli
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.help import SYNONYMS, suggestion
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError

SCRIPTS = (T5PretrainingArgs, BertPretrainingArgs, FinetuningArgs)
NAMES = ("lr", "iters", "model_path", "log_interval", "batch_size", "epochs")


def test_every_name_of_another_program_leads_to_a_flag_of_some_script():
    known = {name for script in SCRIPTS for name in script.__dataclass_fields__}
    assert SYNONYMS.keys() - known == set()


@pytest.mark.parametrize(
    ("script", "written", "meant"),
    [
        (FinetuningArgs, "model_name_or_path", "from_pretrained"),
        (T5PretrainingArgs, "model_name_or_path", "init_checkpoint"),
        (FinetuningArgs, "dataset_name", "data_path"),
        (FinetuningArgs, "num_train_epochs", "epochs"),
        (FinetuningArgs, "per_device_train_batch_size", "batch_size"),
        (BertPretrainingArgs, "tokenizer_name", "tokenizer"),
        (FinetuningArgs, "per_device_train_batchsize", "batch_size"),
        (FinetuningArgs, "leraning_rate", "lr"),
        (FinetuningArgs, "learing_rate", "lr"),
        (FinetuningArgs, "max_step", "iters"),
        (FinetuningArgs, "ouput_dir", "model_path"),
    ],
)
def test_a_name_of_another_program_leads_to_the_flag_of_this_script(script, written, meant):
    assert suggestion(written, script.__dataclass_fields__, "--") == f": did you mean --{meant}?"


def test_all_unknown_flags_are_reported_together():
    old = ["--input_prefix", "a b", "--lr", "1e-3", "--source_prefix=c", "--learning_rate", "2"]
    with pytest.raises(UserError) as error:
        cli.parse(FinetuningArgs, old)
    hint = "did you mean --prefix?"
    message = f"unknown flags --input_prefix: {hint} --source_prefix: {hint} --learning_rate: did you mean --lr?"
    assert str(error.value) == message
