"""The text of `--help`: the flags that matter, all of them, or one group, each with its unit and default.

    --help             some twenty flags, by group
    --help all         every flag
    --help optimizer   one group; a flag's name shows the group that it is in

A program of few flags shows them all. Standard library and tyro only.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tyro

from lm_experiments_tools.config.flags import help_groups
from lm_experiments_tools.errors import UserError

ALL = "all"
_FEW = 30  # flags of a program that can be read at once
# What nearly every run sets; `--help` shows those that a script has.
ESSENTIAL = frozenset(
    """
    data_path valid_data_path vocab tokenizer vocab_file task input_seq_len target_seq_len from_pretrained peft metrics
    model_cfg speed optimizer lr lr_scheduler num_warmup_steps model_path iters epochs seed batch_size
    gradient_accumulation_steps log_interval valid_interval save_interval resume config print_config
    """.split()
)
_FLAGS_OF_UNITS = {
    "updates": "iters num_warmup_steps num_training_steps log_interval valid_interval save_interval profile "
    "profile_after log_norms log_maxima max_skipped_updates find_lr",
    "tokens": "input_seq_len target_seq_len mean_noise_span_length max_sentence_length max_new_tokens min_new_tokens "
    "no_repeat_ngram_size pad_to_multiple_of num_virtual_tokens top_k",
    "examples": "batch_size eval_batch_size valid_samples test_samples max_train_samples max_instances_per_task "
    "max_instances_per_eval_task show_valid_examples data_maximum num_pos_examples num_neg_examples data_n_samples",
    "micro_batches": "gradient_accumulation_steps",
    "rows": "bucket_rows mix_rows",
    "lines": "max_bad_lines",
    "epochs": "epochs data_n_epochs",
    "workers": "virtual_ranks",
    "seconds": "stall_timeout",
    "checkpoints": "keep_checkpoints",
    "validations": "early_stopping_patience lr_drop_patience lr_drop_cooldown",
    "words": "max_ngram",
    "processes": "data_n_workers",
    "streams": "streams",
    "beams": "num_beams",
    "prompts": "num_prompts",
    "rank": "lora_r",
    "rate": "lr lr_drop_min_lr lr_drop_eps find_lr_min find_lr_max",
    "fraction": "dropout_rate lora_dropout noise_density mlm_prob mlm_probability short_seq_prob max_unread "
    "lr_min_ratio thresholds top_p",
    "factor": "lr_drop_factor lr_drop_threshold length_penalty repetition_penalty lora_alpha weight_decay temperature "
    "data_temperature",
    "norm": "clip_grad_norm",
    "magnitude": "clip_grad_value",
    "scale": "min_loss_scale max_loss_scale",
    "weight": "data_weights",
    "teraflops_a_second": "peak_tflops",
    "number": "seed",
}
# What the number of a flag counts, or is.
UNITS = {flag: unit for unit, flags in _FLAGS_OF_UNITS.items() for flag in flags.split()}


def help_topic(argv: Sequence[str]) -> str | None:
    """What is asked after `--help`: a word, "" for none; None where nobody asks."""
    for place, token in enumerate(argv):
        flag, _, attached = token.partition("=")
        if flag in ("-h", "--help"):
            following = argv[place + 1] if place + 1 < len(argv) else ""
            return attached or ("" if following.startswith("-") else following)
    return None


def print_help(args_class: type, files_class: type, topic: str, description: str | None, program: str) -> None:
    """Have tyro print groups as nested dataclasses, which it titles by field name.

    The text above them is printed here: tyro would neither wrap it nor leave its examples as they are.

    Args:
        args_class: flat dataclass whose base classes are the groups.
        files_class: the group of flags about files of settings, which comes last.
        topic: "" for the flags that matter, "all", the name of a group or of a flag.
        description: first paragraphs, not printed with one group.
        program: what is said to be used.

    Raises:
        UserError: no such group or flag.
    """
    groups = {_title(group): group for group in (*help_groups(args_class), files_class)}
    names = {title: list(inspect.get_annotations(group)) for title, group in groups.items()}
    number = sum(map(len, names.values()))
    shown = _shown(names, groups, topic)
    width = shutil.get_terminal_size().columns
    if description is not None and topic in ("", ALL):
        print(wrapped(description, width), end="\n\n")
    known = {field.name: field for cls in (args_class, files_class) for field in dataclasses.fields(cls)}
    types_by_name = typing.get_type_hints(args_class) | typing.get_type_hints(files_class)
    texts = _help_texts(args_class) | _help_texts(files_class)
    titled = []
    for title, of_group in shown.items():
        fields = []
        for name in of_group:
            default = tyro.MISSING if known[name].default is dataclasses.MISSING else known[name].default
            text = texts.get(name) or known[name].metadata.get("help")
            hint = "(default: empty)" if default in ((), "") else None
            metavar = _metavar(name, types_by_name[name])
            about = tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=hint)
            annotation = typing.Annotated[types_by_name[name], about]
            fields.append((name, annotation, dataclasses.field(default=default)))
        group = groups[title]
        made = dataclasses.make_dataclass(group.__name__, fields, frozen=True, namespace={"__doc__": group.__doc__})
        titled.append((title, made, dataclasses.field(default=made())))
    everything = dataclasses.make_dataclass("Everything", titled, frozen=True)
    options = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    sys.stdout.flush()
    with contextlib.suppress(SystemExit):
        tyro.cli(everything, prog=program, args=["--help"], description="", use_underscores=True, config=options)
    if sum(map(len, shown.values())) < number:
        print(wrapped(f"--help all shows all {number} flags, --help GROUP one of {', '.join(groups)}.", width))
    sys.stdout.flush()


def _title(group: type) -> str:
    return re.sub(r"\B[A-Z]", r"_\g<0>", group.__name__.removesuffix("Args")).lower()


def _shown(names: dict[str, list[str]], groups: dict[str, type], topic: str) -> dict[str, list[str]]:
    """The flags to print, by title of their group. A group of the program's own is printed as a whole."""
    topic = topic.strip("-").replace("-", "_").lower()
    if topic == ALL or (not topic and sum(map(len, names.values())) <= _FEW):
        return names
    if not topic:
        scripts = __name__.rpartition(".")[0]
        own = {title for title, group in groups.items() if not group.__module__.startswith(scripts)}
        chosen = {t: [name for name in of if t in own or name in ESSENTIAL] for t, of in names.items()}
        return {title: of_group for title, of_group in chosen.items() if of_group}
    asked = [title for title in names if title == topic]
    asked = asked or [title for title, of_group in names.items() if topic in of_group or title.endswith(f"_{topic}")]
    if asked:
        return {title: names[title] for title in asked}
    flags = [name for of_group in names.values() for name in of_group]
    alike = [title for title in names if title[:4] == topic[:4]]  # a group before a flag that begins so
    nearest = alike or difflib.get_close_matches(topic, [ALL, *names, *flags], n=1)
    hint = f": did you mean --help {nearest[0]}?" if nearest else f": there are {', '.join([ALL, *names])}."
    raise UserError(f"--help {topic} is neither a group of flags nor a flag{hint}")


def _metavar(name: str, annotation: Any) -> str | None:
    """The unit of a number in the place of its type; None for what is no number, which tyro describes."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if name not in UNITS or not {int, float, tuple[float, ...]} & set(parts):
        return None
    unit = UNITS[name].upper()
    if typing.get_origin(annotation) is tuple:
        return f"[{unit} [{unit} ...]]"
    return f"{{None}}|{unit}" if type(None) in parts else unit


def _help_texts(args_class: type) -> dict[str, str]:
    """The string under each field in the source of a class, as one line (tyro would keep its line breaks).

    A class that repeats a field may have a text of its own; else that of the class that declares it stays.
    """
    texts = {}
    for cls in reversed(args_class.__mro__):
        if not inspect.get_annotations(cls):
            continue
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):  # a class made at run time
            continue
        for field, text in pairwise(ast.parse(textwrap.dedent(source)).body[0].body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(text.value.value.split())
    return texts


def wrapped(text: str, width: int) -> str:
    """A docstring for the screen: paragraphs filled to `width`, indented blocks as they are, "::" as a colon."""
    blocks = []
    for block in inspect.cleandoc(text).split("\n\n"):
        is_example = block.startswith(" ")
        blocks.append(block if is_example else textwrap.fill(block.replace("::", ":"), width))
    return "\n\n".join(blocks)
