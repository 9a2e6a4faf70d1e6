"""Flags that do not exist, and what is said of them."""

import pytest

from lm_experiments_tools.config import cli
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.suggestions import SYNONYMS, suggestion
from lm_experiments_tools.errors import UserError

NAMES = ("lr", "iters", "model_path", "log_interval", "batch_size", "epochs")


def test_every_name_of_another_program_leads_to_a_flag_of_some_script():
    known = {name for script in (T5PretrainingArgs, FinetuningArgs) for name in script.__dataclass_fields__}
    assert {meant for meant in SYNONYMS.values() if meant not in known} == set()


def test_flags_of_the_ancestor_are_reported_at_once_with_what_they_are_called_here():
    old = [
        "--task_name",
        "qmsum",
        "--input_prefix",
        "a b",
        "--lr",
        "1e-3",
        "--source_prefix=c",
        "--data_n_workers",
        "2",
    ]
    with pytest.raises(UserError) as error:
        cli.parse(FinetuningArgs, old)
    sentence = str(error.value)
    assert sentence.startswith("unknown flags --task_name: --data_path names the data and --task its kind. ")
    assert "--input_prefix: here it is called --prefix. --source_prefix: here it is called --prefix." in sentence
    assert sentence.endswith("--data_n_workers: leave it out, batches need no processes of their own.")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("per_device_train_batchsize", "batch_size"),
        ("num_train_epoch", "epochs"),
        ("leraning_rate", "lr"),
        ("learing_rate", "lr"),
        ("max_step", "iters"),
        ("ouput_dir", "model_path"),
    ],
)
def test_a_mistyped_name_of_another_program_leads_to_ours(written, meant):
    assert suggestion(written, NAMES) == (f": did you mean {meant}?")
