"""Print the JSON schema of a script's YAML file, by which editors complete and check it; or a shell's completion.

    lmtools schema pretrain-t5 > pretrain-t5.schema.json
    lmtools schema bash >> ~/.bashrc

A YAML file names its schema in the first line: # yaml-language-server: $schema=pretrain-t5.schema.json. In zsh,
bashcompinit comes before: autoload -U bashcompinit && bashcompinit.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import MISSING, dataclass
from typing import Any

from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.cli import ConfigArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.flags import Flag, flags_of, help_texts
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.suggestions import ALIASES, own_name

POSITIONAL = "of"
CLASSES = {"pretrain-t5": T5PretrainingArgs, "pretrain-bert": BertPretrainingArgs, "finetune": FinetuningArgs}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, kw_only=True)
class SchemaArgs:
    """What is printed."""

    of: typing.Literal["pretrain-t5", "pretrain-bert", "finetune", "bash"]
    """A script, for the schema of its YAML file; or bash, for completion. As the first argument it needs no flag."""


def run(args: SchemaArgs) -> None:
    """Print the schema or the completion."""
    print(completion() if args.of == "bash" else json.dumps(schema(CLASSES[args.of]), indent=2, ensure_ascii=False))


def schema(args_class: type) -> dict[str, Any]:
    """JSON schema of the YAML files that `--config` of a script reads."""
    flags, texts = flags_of(args_class), help_texts(args_class)
    properties = {name: {**_property(flag), "description": texts[name]} for name, flag in flags.items()}
    properties |= {name: properties[own_name(name, flags)] for name in ALIASES if own_name(name, flags) in flags}
    properties["base"] = {"type": ["string", "array"], "items": {"type": "string"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(flag: Flag) -> dict[str, Any]:
    """Type and default of a flag. A list may be one value, and a phase a mapping."""
    hint = typing.get_args(flag.annotation)[0] if flag.is_list else flag.annotation
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found: dict[str, Any] = {
        "anyOf": [_kind(option, flag) for option in (typing.get_args(hint) if is_union else [hint])]
    }
    if flag.name == "phases":
        found["anyOf"].append({"type": "object"})
    if flag.is_list:
        found = {"anyOf": [*found["anyOf"], {"type": "array", "items": found}]}
    return found if flag.default is MISSING else {**found, "default": flag.default}


def _kind(hint: Any, flag: Flag) -> dict[str, Any]:
    if typing.get_origin(hint) is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    if flag.is_length and hint is int:
        return {"type": ["integer", "string"], "pattern": r"^\d+(\.\d+)?([kMBT]?tok)?$"}
    # YAML reads 1e-4 as text, and our parser as the number that it is; names such as 1e3 may be meant as text.
    return {"type": [_TYPES[hint], "string"]} if hint in (int, float) else {"type": _TYPES[hint]}


def completion() -> str:
    """A bash function that completes the commands of lmtools and the flags of the scripts."""
    from lm_experiments_tools.tools.main import COMMANDS, SCRIPTS

    commands = " ".join([*COMMANDS, *SCRIPTS])
    flags = {name: " ".join(f"--{flag}" for flag in flags_of(cls, ConfigArgs)) for name, cls in CLASSES.items()}
    cases = "\n".join(f'    {name}) words="{of}" ;;' for name, of in flags.items())
    return f"""_lmtools() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  [ "$COMP_CWORD" = 1 ] && words="{commands} --help --version"
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
    inspect|plan) [ "$COMP_CWORD" = 2 ] && words="{" ".join(CLASSES)}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lmtools lmtools"""
