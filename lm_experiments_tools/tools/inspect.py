"""Show the data of a run before the run: counts, lengths, padding, steps, samples as the model gets them.

    lmtools inspect --config run.yaml
    lmtools inspect --data_path big.jsonl --vocab my.model --task prefix_lm --documents 2000 --output look/
    lmtools inspect pretrain-bert --data_path DATA_text_sentence --vocab_file vocab.txt --input_seq_len 128
    lmtools inspect finetune --tokenizer t5-small --data_path train.jsonl --valid_data_path valid.jsonl

The first word names the script whose data is shown: pretrain-t5 (the default), pretrain-bert or finetune. Flags and
YAML files are those of that script.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_experiments_tools.config.bert import BertDataArgs, BertObjectiveArgs, BertPretrainingArgs
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.finetuning import FinetuningArgs, InstructionArgs, LengthArgs, TaskArgs
from lm_experiments_tools.config.flags import check_groups
from lm_experiments_tools.config.objectives import ObjectiveArgs
from lm_experiments_tools.config.pretraining import DataArgs, MixtureArgs, T5PretrainingArgs
from lm_experiments_tools.config.training import BatchArgs, RunArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.inspection.args import SampleArgs, TokenArgs

# Only flags about data are checked: those of the model and its training may be incomplete.


@dataclass(frozen=True, kw_only=True)
class InspectT5Args(T5PretrainingArgs, SampleArgs, TokenArgs):
    """The flags of run_t5_pretraining.py, and those of inspection."""

    def __post_init__(self) -> None:
        check_groups(self, (DataArgs, MixtureArgs, ObjectiveArgs, BatchArgs, RunArgs, SampleArgs, TokenArgs))


@dataclass(frozen=True, kw_only=True)
class InspectBertArgs(BertPretrainingArgs, SampleArgs, TokenArgs):
    """The flags of run_bert_pretraining.py, and those of inspection."""

    def __post_init__(self) -> None:
        check_groups(self, (BertDataArgs, MixtureArgs, BertObjectiveArgs, BatchArgs, RunArgs, SampleArgs, TokenArgs))


@dataclass(frozen=True, kw_only=True)
class InspectFinetuningArgs(FinetuningArgs, SampleArgs):
    """The flags of run_finetuning.py, and those of inspection."""

    def __post_init__(self) -> None:
        check_groups(self, (TaskArgs, LengthArgs, InstructionArgs, BatchArgs, SampleArgs))


SCRIPTS = {"pretrain-t5": InspectT5Args, "pretrain-bert": InspectBertArgs, "finetune": InspectFinetuningArgs}
_MODULES = {"pretrain-t5": "t5", "pretrain-bert": "bert", "finetune": "finetuning"}


def main(argv: Sequence[str]) -> int:
    """Read the kind of data and the flags, and print what there is; returns 0. Raises UserError."""
    is_named = bool(argv) and not argv[0].startswith("-")
    kind, *flags = argv if is_named else ["pretrain-t5", *argv]
    if kind not in SCRIPTS:
        raise UserError(f"lmtools inspect {kind}: the first word is one of {', '.join(SCRIPTS)}")
    args, _ = parse(
        SCRIPTS[kind],
        flags,
        description=__doc__,
        inherit=_inherit if kind == "finetune" else None,
        program=f"lmtools inspect {kind}" if is_named else "lmtools inspect",
    )
    for section in importlib.import_module(f"lm_experiments_tools.tools.inspection.{_MODULES[kind]}").sections(args):
        section.print()
    return 0


def _inherit(given: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    from lm_experiments_tools.models.inherited import inherited_settings

    return inherited_settings(given)
