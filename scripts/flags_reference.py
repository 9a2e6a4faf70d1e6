"""Pages of all flags, made from the dataclasses of the scripts and of `lmtools` (used by build_site.py)."""

import dataclasses
import html
import importlib
import re

from lm_experiments_tools.config.cli import ConfigArgs
from lm_experiments_tools.config.flags import Flag, describe, flags_of, help_texts
from lm_experiments_tools.names import resolve_name
from lm_experiments_tools.tools.main import COMMANDS

SCRIPTS = {
    "flags_t5.md": ("run_t5_pretraining.py", "pretraining:T5PretrainingArgs"),
    "flags_bert.md": ("run_bert_pretraining.py", "bert:BertPretrainingArgs"),
    "flags_finetuning.md": ("run_finetuning.py", "finetuning:FinetuningArgs"),
}
HEAD = "| flag | value | meaning |\n|---|---|---|\n"
RULES = """`--no_FLAG` turns a boolean flag off. A list takes several values: `--FLAG a b`. In a file of
`--config` each flag is `name: value`. `--help GROUP` prints one of these groups in the terminal."""


def _cell(text: str) -> str:
    """Text that neither Markdown nor a table's cell changes; code in backquotes stays code."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "/"))
    return "".join(p if p[:1] == "`" else re.sub(r"([\\*_\[\]])", r"\\\1", html.escape(p, quote=False)) for p in parts)


def _table(flags: dict[str, Flag], texts: dict[str, str]) -> str:
    rows = []
    for name, flag in flags.items():
        default = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else str(flag.default)
        default = f"default `{default}`" if default else "default empty"
        default = "required" if flag.default is dataclasses.MISSING else default
        rows.append(f"| `--{name}` | {describe(flag.annotation)}; {default} | {_cell(texts[name])} |")
    return HEAD + "\n".join(rows) + "\n"


def _groups(args_class: type) -> str:
    """A section for each group of flags, with the groups' docstrings."""
    flags, texts = flags_of(args_class, ConfigArgs), help_texts(args_class) | help_texts(ConfigArgs)
    sections = []
    for group in dict.fromkeys(flag.group for flag in flags.values()):
        title = re.sub(r"\B[A-Z]", r" \g<0>", group.__name__.removesuffix("Args")).lower().capitalize()
        members = {name: flag for name, flag in flags.items() if flag.group is group}
        about = _cell(" ".join(group.__doc__.split()))
        sections.append(f"## {title}\n{about}\n\n{_table(members, texts)}")
    return "\n".join(sections)


def _own_flags(command: str, of_scripts: set[str]) -> tuple[dict[str, Flag], dict[str, str], str]:
    """Flags of a command, their texts, and the sentence about the flags that it takes from scripts."""
    module = importlib.import_module(f"lm_experiments_tools.tools.{command}")
    classes = list(getattr(module, "SCRIPTS", {}).values()) or [getattr(module, f"{command.capitalize()}Args")]
    flags = {name: flag for cls in classes for name, flag in flags_of(cls).items()}
    texts = {name: text for cls in classes for name, text in help_texts(cls).items()}
    if len(flags) < len(of_scripts) / 2:
        return flags, texts, ""
    script = "the script that its first word names" if len(classes) > 1 else "`run_finetuning.py`"
    own = {name: flag for name, flag in flags.items() if name not in of_scripts}
    return own, texts, f"It takes the flags of {script}, and these:\n\n"


def flags_pages() -> dict[str, str]:
    """Map each page's file name to its Markdown."""
    pages, of_scripts = {}, set()
    for page, (script, place) in SCRIPTS.items():
        args_class = resolve_name(f"lm_experiments_tools.config.{place}")
        of_scripts |= flags_of(args_class).keys()
        pages[page] = f"# Flags of {script}\n\n{RULES}\n\n{_groups(args_class)}"
    tools = ["# Flags of lmtools\n\n`lmtools COMMAND --help` prints the flags of one command.\n"]
    for command, summary in COMMANDS.items():
        flags, texts, inherited = _own_flags(command, of_scripts)
        tools.append(
            f"## lmtools {command}\n{_cell(summary[0].upper() + summary[1:])}.\n\n{inherited}{_table(flags, texts)}"
        )
    return pages | {"flags_lmtools.md": "\n".join(tools)}
