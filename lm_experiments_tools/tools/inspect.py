"""Show the data of a run before training: counts, lengths, padding, steps, and samples of model inputs.

    lmtools inspect --config run.yaml
    lmtools inspect --data_path big.jsonl --vocab my.model --task prefix_lm --documents 2000
    lmtools inspect pretrain-bert --data_path DATA_text_sentence --vocab_file vocab.txt --input_seq_len 128
    lmtools inspect finetune --tokenizer t5-small --data_path train.jsonl --valid_data_path valid.jsonl

The first word names the training script: pretrain-t5 (the default), pretrain-bert or finetune. Flags are those of the
script.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lm_experiments_tools.checkpoint.source import TOKENIZER_FILES, hub_folder, may_be_on_hub
from lm_experiments_tools.config.bert import BertDataArgs, BertObjectiveArgs, BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs, InstructionArgs, LengthArgs, TaskArgs
from lm_experiments_tools.config.flags import COUNT, NOT_NEGATIVE, check_groups
from lm_experiments_tools.config.objectives import ObjectiveArgs
from lm_experiments_tools.config.pretraining import DataArgs, MixtureArgs, T5PretrainingArgs
from lm_experiments_tools.config.training import BatchArgs, RunArgs
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.text.tokenizer import BYTES
from lm_experiments_tools.data.tokens.indexed import token_prefix
from lm_experiments_tools.tools.scripts import parse_flags_of_script


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    """Which samples of the training data are printed."""

    samples: Annotated[int, NOT_NEGATIVE] = 3
    """Samples to show, the first ones of the run; of fine-tuning, of each split. With --packing: rows."""
    world_size: Annotated[int, COUNT] = 1
    """Workers of the planned run. Steps of an epoch and the rows of a micro-batch depend on it."""


@dataclass(frozen=True, kw_only=True)
class TokenArgs:
    """Which documents are counted."""

    documents: Annotated[int | None, COUNT] = None
    """Inspect only the first N documents of each --data_path. None: all; 10000 of a Hugging Face dataset and with
    --streaming."""


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


def main(argv: Sequence[str]) -> int:
    """Run `lmtools inspect` with the name of a script and its flags; returns the exit code. Raises UserError."""
    script, args, _ = parse_flags_of_script("inspect", argv, SCRIPTS, __doc__)
    show(script, args)
    return 0


def _find_inputs(script: str, args: Any) -> None:
    """Refuse a tokenizer or text that is not there before torch is loaded, which takes seconds. Raises UserError."""
    for flag in ("vocab", "tokenizer", "from_pretrained"):
        name = getattr(args, flag, None)
        if name not in (None, BYTES) and not os.path.exists(name) and may_be_on_hub(name):
            hub_folder(name, f"--{flag}", TOKENIZER_FILES)
    for path in args.data_path if script == "pretrain-t5" else ():
        if token_prefix(path) is None:
            plan_shards([path])


def show(script: str, args: InspectT5Args | InspectBertArgs | InspectFinetuningArgs) -> None:
    """Print the sections about the data of a script. Raises UserError."""
    if args.working_dir == ".":
        _find_inputs(script, args)
    if script == "finetune":
        from lm_experiments_tools.tools.inspect_finetuning import sections
    elif script == "pretrain-bert":
        from lm_experiments_tools.tools.inspect_pretraining import bert_sections as sections
    else:
        from lm_experiments_tools.tools.inspect_pretraining import t5_sections as sections
    for title, facts, samples in sections(args):
        print(f"\n{title}")
        for name, text in facts:
            print(f"  {name:<10} {text}")
        for name, lines in samples:
            print("\n" + "\n  ".join([name, *lines]))
