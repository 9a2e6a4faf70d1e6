"""Estimate the memory of a run, or find settings that fit.

    lmtools plan pretrain-t5 --model_cfg t5-v1_1-base --batch_size 32 --input_seq_len 512
    lmtools plan pretrain-bert --model_cfg bert_base_uncased --batch_size 64 --input_seq_len 128 --fit 24GiB
    lmtools plan finetune --from_pretrained t5-large --peft lora --batch_size 8
    lmtools plan pretrain-t5 --config run.yaml
    lmtools plan pretrain-t5 --model_cfg t5-11b --device cuda --workers 8 --sharding fsdp

The first word names the training script. Flags are those of the script and those below.
The model's code runs one step on tensors without data, so no memory is allocated. See docs/out_of_memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_experiments_tools.config.bert import BertObjectiveArgs, BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs, LengthArgs, MemoryArgs
from lm_experiments_tools.config.flags import check_groups
from lm_experiments_tools.config.objectives import ObjectiveArgs
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.training import BatchArgs, ModelArgs, PrecisionArgs
from lm_experiments_tools.tools.scripts import parse_flags_of_script

# Groups of flags that an estimate depends on; data and schedule need not be complete.
_READ = (BatchArgs, PrecisionArgs, ModelArgs, PlanningArgs)


@dataclass(frozen=True, kw_only=True)
class PlanT5Args(T5PretrainingArgs, PlanningArgs):
    """The flags of run_t5_pretraining.py and of the memory estimate."""

    def __post_init__(self) -> None:
        check_groups(self, (*_READ, ObjectiveArgs))


@dataclass(frozen=True, kw_only=True)
class PlanBertArgs(BertPretrainingArgs, PlanningArgs):
    """The flags of run_bert_pretraining.py and of the memory estimate."""

    data_path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_groups(self, (*_READ, BertObjectiveArgs))


@dataclass(frozen=True, kw_only=True)
class PlanFinetuningArgs(FinetuningArgs, PlanningArgs):
    """The flags of run_finetuning.py and of the memory estimate."""

    def __post_init__(self) -> None:
        check_groups(self, (*_READ, LengthArgs, MemoryArgs))


SCRIPTS = {"pretrain-t5": PlanT5Args, "pretrain-bert": PlanBertArgs, "finetune": PlanFinetuningArgs}


def main(argv: Sequence[str]) -> int:
    """Run `lmtools plan` with the name of a script and its flags; returns the exit code. Raises UserError."""
    _, args, origins = parse_flags_of_script("plan", argv, SCRIPTS, __doc__)
    from lm_experiments_tools.planning.show import show  # torch, which a mistyped flag need not wait for

    show(args, args, origins)
    return 0
