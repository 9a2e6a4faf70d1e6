"""Parse the flags of a training script for `lmtools inspect` and `lmtools plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models import inherited

_INHERIT = {
    "pretrain-t5": inherited.of_t5,
    "pretrain-bert": inherited.of_bert,
    "finetune": inherited.inherited_settings,
}


def parse_flags_of_script(
    command: str, argv: Sequence[str], classes: Mapping[str, type], description: str | None
) -> tuple[str, Any, dict[str, str]]:
    """Parse the name of a training script (default: pretrain-t5) and its flags, by the dataclass that `classes` names.

    Returns name of the script, arguments, and the origin of each value.
    """
    is_named = bool(argv) and not argv[0].startswith("-")
    name, *flags = argv if is_named else ["pretrain-t5", *argv]
    if name not in classes:
        raise UserError(f"lmtools {command} {name}: name one of {', '.join(classes)}; --config takes a YAML file.")
    program = f"lmtools {command} {name}" if is_named else f"lmtools {command}"
    args, origins = parse(classes[name], flags, description=description, inherit=_INHERIT[name], program=program)
    return name, args, origins
