"""The text of `--help`. Standard library only.

--help             some twenty flags, by group
--help all         every flag
--help optimizer   one group; a flag's name shows its group
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Sequence

from lm_experiments_tools.config.flags import Flag, flags_of, help_texts
from lm_experiments_tools.errors import UserError

ALL = "all"
_FEW = 30  # a program with no more flags shows them all
# What nearly every run sets; `--help` shows those that a script has.
ESSENTIAL = frozenset(
    """
    data_path valid_data_path vocab tokenizer vocab_file task input_seq_len target_seq_len from_pretrained peft metrics
    model_cfg speed optimizer lr lr_scheduler num_warmup_steps model_path iters epochs seed batch_size
    gradient_accumulation_steps log_interval valid_interval save_interval resume config print_config dry_run
    """.split()
)


def help_topic(argv: Sequence[str]) -> str | None:
    """Return the word after `--help`: "" if there is none, None without `--help`."""
    for position, token in enumerate(argv):
        flag, _, attached = token.partition("=")
        if flag in ("-h", "--help"):
            following = argv[position + 1] if position + 1 < len(argv) else ""
            return attached or ("" if following.startswith("-") else following)
    return None


def help_text(args_class: type, files_class: type, topic: str, description: str | None, program: str) -> str:
    """Return the text that `--help` prints. UserError for an unknown topic.

    Args:
        topic: "" for the essential flags, "all", or the name of a group or a flag.
    """
    flags, texts = flags_of(args_class, files_class), help_texts(args_class) | help_texts(files_class)
    groups = {_title(flag.group): flag.group for flag in flags.values()}
    names = {title: [name for name in flags if flags[name].group is group] for title, group in groups.items()}
    shown = _shown(names, groups, topic)
    width = shutil.get_terminal_size().columns
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [--FLAG VALUE ...]",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=width),
    )
    for title, names_of_group in shown.items():
        group = parser.add_argument_group(f"{title} options", " ".join((groups[title].__doc__ or "").split()))
        for name in names_of_group:
            flag, is_bool = flags[name], flags[name].annotation is bool
            options: dict = {"action": "store_true"} if is_bool else {"metavar": _metavar(flag)}
            options |= {"nargs": "+"} if flag.is_list else {}
            text = f"{texts[name]} ({_default(flag)})".strip().replace("%", "%%")
            group.add_argument(f"--{name}", *([f"--no_{name}"] if is_bool else []), help=text, **options)
    above = [wrapped(description, width)] if description is not None and topic in ("", ALL) else []
    hint = wrapped(f"--help all shows all {len(flags)} flags, --help GROUP one of {', '.join(groups)}.", width)
    below = [hint] if sum(map(len, shown.values())) < len(flags) else []
    return "\n\n".join([*above, parser.format_help().strip(), *below])


def _title(group: type) -> str:
    return re.sub(r"\B[A-Z]", r"_\g<0>", group.__name__.removesuffix("Args")).lower()


def _shown(names: dict[str, list[str]], groups: dict[str, type], topic: str) -> dict[str, list[str]]:
    """The flags to print, by title of their group. Groups defined outside this package are printed in full."""
    topic = topic.strip("-").replace("-", "_").lower()
    if topic == ALL or (not topic and sum(map(len, names.values())) <= _FEW):
        return names
    if not topic:
        package = __name__.rpartition(".")[0]
        in_full = {title for title, group in groups.items() if not group.__module__.startswith(package)}
        chosen = {t: [name for name in of if t in in_full or name in ESSENTIAL] for t, of in names.items()}
        return {title: of_group for title, of_group in chosen.items() if of_group}
    found = [title for title in names if title == topic]
    found = found or [title for title, of_group in names.items() if topic in of_group or title.endswith(f"_{topic}")]
    if found:
        return {title: names[title] for title in found}
    flags = [name for of_group in names.values() for name in of_group]
    nearest = difflib.get_close_matches(topic, [ALL, *names, *flags], n=1)
    hint = f": did you mean --help {nearest[0]}?" if nearest else f": there are {', '.join([ALL, *names])}."
    raise UserError(f"--help {topic} is neither a group of flags nor a flag{hint}")


def _default(flag: Flag) -> str:
    if flag.default is dataclasses.MISSING:
        return "required"
    is_empty = flag.default in ((), "")
    shown = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    return f"default: {'empty' if is_empty else shown}"


def _metavar(flag: Flag) -> str:
    """The words of a choice, or the type."""
    options = [flag.annotation, *typing.get_args(flag.annotation)]
    choices = next((option for option in options if typing.get_origin(option) is typing.Literal), None)
    if choices is not None:
        return "{" + ",".join(map(str, typing.get_args(choices))) + "}"
    kind = next(option for option in options if option in (int, float, str))
    return kind.__name__.upper()


def wrapped(text: str, width: int) -> str:
    """Wrap a docstring to `width` columns; indented blocks are unchanged and "::" becomes a colon."""
    blocks = inspect.cleandoc(text).split("\n\n")
    filled = [b if b.startswith(" ") else textwrap.fill(b.replace("::", ":"), width) for b in blocks]
    return "\n\n".join(filled)
