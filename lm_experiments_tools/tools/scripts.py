"""Parse the flags of a training script for `lmtools inspect` and `lmtools plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import inherited

_INHERIT = {
    "pretrain-t5": inherited.of_t5,
    "pretrain-bert": inherited.of_bert,
    "finetune": inherited.inherited_settings,
}
_FILES = {"run_t5_pretraining": "pretrain-t5", "run_bert_pretraining": "pretrain-bert", "run_finetuning": "finetune"}
# Settings that only one script has, by which a YAML file is recognized.
_MARKS = {
    "pretrain-bert": ("use_nsp", "vocab_file", "short_seq_prob", "mlm_prob"),
    "finetune": ("from_pretrained", "peft", "model_type", "quantize", "epochs"),
}


def parse_flags_of_script(
    command: str, argv: Sequence[str], classes: Mapping[str, type], description: str | None
) -> tuple[str, Any, dict[str, str]]:
    """Parse the name of a training script and its flags.

    Args:
        command: name of the lmtools command, for `--help`.
        argv: name or file of a script (default: pretrain-t5) or a YAML file of its settings, then flags.
        classes: script -> dataclass of its flags and those of the command.
        description: first paragraph of `--help`.

    Returns:
        Name of the script, arguments, and the origin of each value.

    Raises:
        UserError: an unknown script, or an error of `cli.parse`.
    """
    is_named = bool(argv) and not argv[0].startswith("-")
    word, *flags = argv if is_named else ["pretrain-t5", *argv]
    name = _FILES.get(Path(word).stem, word)
    if name not in classes:
        if not word.endswith((".yaml", ".yml")):
            raise UserError(f"lmtools {command} {word}: name one of {', '.join(classes)}, or a YAML file of settings.")
        name, flags = _script_of(word), ["--config", word, *flags]
    program = f"lmtools {command} {name}" if is_named else f"lmtools {command}"
    args, origins = parse(classes[name], flags, description=description, inherit=_INHERIT[name], program=program)
    return name, args, origins


def _script_of(path: str) -> str:
    """The script whose settings a YAML file holds."""
    file = Path(path)
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""  # `parse` reports it
    keys = {line.partition(":")[0].strip() for line in text.splitlines()}
    return next((script for script, marks in _MARKS.items() if keys & set(marks)), "pretrain-t5")
