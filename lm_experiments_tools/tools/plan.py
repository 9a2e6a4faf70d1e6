"""Estimate the memory of a run, or find settings that fit.

    lmtools plan pretrain-t5 --model_cfg t5-v1_1-base --batch_size 32 --input_seq_len 512
    lmtools plan pretrain-bert --model_cfg bert_base_uncased --batch_size 64 --input_seq_len 128 --fit 24GiB
    lmtools plan finetune --from_pretrained t5-large --peft lora --batch_size 8
    lmtools plan run.yaml
    lmtools plan pretrain-t5 --model_cfg t5-11b --device cuda --workers 8 --sharding fsdp

Flags are those of the script (pretrain-t5, pretrain-bert, finetune, or its file), and those below. A YAML file instead
of the script is passed to `--config`. The model's own code runs one step on tensors without data: nothing is
allocated. See docs/out_of_memory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_experiments_tools.config.bert import BertObjectiveArgs, BertPretrainingArgs
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.finetuning import FinetuningArgs, LengthArgs, MemoryArgs
from lm_experiments_tools.config.flags import check_groups
from lm_experiments_tools.config.objectives import ObjectiveArgs
from lm_experiments_tools.config.planning import PlanningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.training import BatchArgs, ModelArgs, PrecisionArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import inherited

# Groups of flags that an estimate depends on; data and schedule need not be complete.
_READ = (BatchArgs, PrecisionArgs, ModelArgs, PlanningArgs)


@dataclass(frozen=True, kw_only=True)
class PlanT5Args(T5PretrainingArgs, PlanningArgs):
    """The flags of run_t5_pretraining.py, and those of the estimate."""

    def __post_init__(self) -> None:
        check_groups(self, (*_READ, ObjectiveArgs))


@dataclass(frozen=True, kw_only=True)
class PlanBertArgs(BertPretrainingArgs, PlanningArgs):
    """The flags of run_bert_pretraining.py, and those of the estimate."""

    data_path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_groups(self, (*_READ, BertObjectiveArgs))


@dataclass(frozen=True, kw_only=True)
class PlanFinetuningArgs(FinetuningArgs, PlanningArgs):
    """The flags of run_finetuning.py, and those of the estimate."""

    def __post_init__(self) -> None:
        check_groups(self, (*_READ, LengthArgs, MemoryArgs))


SCRIPTS = {"pretrain-t5": PlanT5Args, "pretrain-bert": PlanBertArgs, "finetune": PlanFinetuningArgs}
_INHERIT = {"pretrain-t5": inherited.of_t5, "pretrain-bert": inherited.of_bert, "finetune": None}
_FILES = {"run_t5_pretraining": "pretrain-t5", "run_bert_pretraining": "pretrain-bert", "run_finetuning": "finetune"}
# Settings that only one script has, by which a YAML file is recognized.
_MARKS = {
    "pretrain-bert": ("use_nsp", "vocab_file", "short_seq_prob", "mlm_prob"),
    "finetune": ("from_pretrained", "peft", "model_type", "quantize", "epochs"),
}


def main(argv: Sequence[str]) -> int:
    """Read the script or file and the flags, and print the estimate; returns 0. Raises UserError."""
    names_one = bool(argv) and not argv[0].startswith("-")
    word, *flags = argv if names_one else ["pretrain-t5", *argv]
    name = _FILES.get(Path(word).stem, word)
    if name not in SCRIPTS:
        if not word.endswith((".yaml", ".yml")):
            raise UserError(f"lmtools plan {word}: name one of {', '.join(SCRIPTS)}, or a YAML file of settings")
        name, flags = _script_of(word), ["--config", word, *flags]
    args, origins = parse(
        SCRIPTS[name],
        flags,
        description=__doc__,
        inherit=_INHERIT[name],
        program=f"lmtools plan {name}" if names_one else "lmtools plan",
    )
    from lm_experiments_tools.planning.show import show  # torch, which a mistyped flag need not wait for

    show(args, args, origins)
    return 0


def _script_of(path: str) -> str:
    """The script whose settings a YAML file holds."""
    file = Path(path)
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""  # `parse` reports it
    keys = {line.partition(":")[0].strip() for line in text.splitlines()}
    return next((script for script, marks in _MARKS.items() if keys & set(marks)), "pretrain-t5")
