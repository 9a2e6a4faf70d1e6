"""Command-line flags as fields of a dataclass, with rules in their annotations. Standard library only.

Examples:

    log_interval: Annotated[int, HARMLESS, COUNT] = 10                     a resumed run may change it; at least 1
    min_loss_scale: Annotated[float | None, needs("fp16")] = None          refused without --fp16
"""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_type_hints

from lm_experiments_tools.config.lengths import Tokens
from lm_experiments_tools.errors import UserError

Rule = TypeVar("Rule")
HARMLESS = "harmless"  # a resumed run may change the flag: it alters neither model, data nor the updates made so far
COMMAND_LINE, DEFAULT = "command line", "default"  # origins of a setting
AUTO = "auto"  # of --model_path: the script makes a run directory
RUNS = "LMTOOLS_RUNS"  # environment variable: folder of these directories, or none
LENGTH = "length"  # a number of updates that may also be given in tokens
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NULL_WORDS = ("null", "none", "~", "")
_INSTEAD = {"num_warmup_steps": " (--warmup_ratio takes a fraction)"}  # of flags whose names mislead
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}


@dataclasses.dataclass(frozen=True)
class Range:
    """Rule for a flag: its value is None or a finite number in this range.

    Attributes:
        reason: the error message, in which {default} is filled in.
    """

    holds: Callable[[Any], bool]
    reason: str


def at_least(minimum: float) -> Range:
    """Create the rule that a flag's value is at least `minimum`."""
    return Range(lambda value: value >= minimum, f"it must be at least {minimum:g}")


COUNT, NOT_NEGATIVE = at_least(1), at_least(0)
POSITIVE = Range(lambda value: value > 0, "it must be above 0 and finite")
PART = Range(lambda value: 0 < value < 1, "it must be above 0 and below 1, for example {default}")
FRACTION = Range(lambda value: 0 <= value <= 1, "it must be a fraction, from 0 to 1")
DROPOUT = Range(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True, eq=False)
class Ignored:
    """Rule for a flag: it is refused where other arguments make it useless.

    Attributes:
        when: returns True for arguments with which the flag has no effect.
        reason: rest of the error message after the flag's name; {flag} and {any argument} are filled in.
        in_run: True if only the scripts refuse it, and `FineTuner` accepts it.
    """

    when: Callable[[Any], bool]
    reason: str
    in_run: bool = False


def needs(flag: str, *values: str, reason: str | None = None) -> Ignored:
    """Create the rule that a flag is refused unless another flag is given, or has one of `values`.

    `reason` is the rest of the error message; None writes one.
    """
    if values:
        return Ignored(
            lambda args: getattr(args, flag) not in values,
            reason or f"needs --{flag} {' or '.join(values)}, and --{flag} is {{{flag}}}",
        )
    return Ignored(lambda args: not getattr(args, flag), reason or f"needs --{flag}, which is not given")


@dataclasses.dataclass(frozen=True)
class Flag:
    """A command-line flag, made from a field of a dataclass.

    Attributes:
        annotation: T, T | None or tuple[T, ...], where T is bool, int, float, str or a Literal.
        default: `dataclasses.MISSING` if the flag is required.
        group: the class that declares the field, a group of `--help`.
        is_length: True if the value may be in tokens (10Btok).
    """

    name: str
    annotation: Any
    default: Any
    group: type
    is_length: bool = False

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.annotation) is tuple

    @property
    def kind(self) -> str:
        """Description of the value, for error messages."""
        return describe(self.annotation) + _INSTEAD.get(self.name, "")

    def read(self, text: str) -> Any:
        """Parse the value of the flag, or one item of a tuple. Raises ValueError."""
        item = typing.get_args(self.annotation)[0] if self.is_list else self.annotation
        try:
            if self.is_length and text.endswith("tok"):
                return Tokens.read(text)
            return _value(text, item)
        except ValueError:
            raise ValueError(f"takes {self.kind}, not {text!r}") from None


def _value(text: str, annotation: Any) -> Any:
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return options[list(map(str, options)).index(text)]
    if type(None) in options:
        (kind,) = (option for option in options if option is not type(None))
        is_null = text in ("None", "none") if kind is str else text.lower() in NULL_WORDS
        return None if is_null else _value(text, kind)
    if annotation is bool:
        return (*FALSE_WORDS, *TRUE_WORDS).index(text.lower()) >= len(FALSE_WORDS)
    # A whole number may be written 1e5.
    if annotation is int and "e" in text.lower() and float(text).is_integer():
        return int(float(text))
    return annotation(text)


def describe(annotation: Any) -> str:
    """Describe a type for help and error messages."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, options))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(map(describe, options))
    if typing.get_origin(annotation) is tuple:
        return f"a list, each {describe(options[0])}"
    return _TYPE_NAMES[annotation]


def help_groups(args_class: type) -> list[type]:
    """Return the base classes that declare the fields of `args_class`, in the order of the fields."""
    bases = [cls for cls in reversed(args_class.__mro__) if inspect.get_annotations(cls)]
    return [cls for cls in bases if not any(issubclass(cls, other) for other in bases if other is not cls)]


@functools.cache
def flags_of(*args_classes: type) -> Mapping[str, Flag]:
    """Return the flags of these dataclasses by name, in the order of their groups."""
    flags = {}
    for args_class in args_classes:
        types_by_name, rules = get_type_hints(args_class), rules_of(args_class)
        group_of = {name: group for group in help_groups(args_class) for name in inspect.get_annotations(group)}
        for field in dataclasses.fields(args_class):
            group = group_of.get(field.name, args_class)
            is_length = LENGTH in rules.get(field.name, ())
            flags[field.name] = Flag(field.name, types_by_name[field.name], field.default, group, is_length)
    return types.MappingProxyType(flags)


def help_texts(args_class: type) -> dict[str, str]:
    """Return the help text of each field: the string under it in the source, or `help` of its metadata."""
    texts = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(args_class)}
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


# ---- rules ----------------------------------------------------------------------------------------------------------
@functools.cache
def rules_of(args_class: type) -> dict[str, tuple[Any, ...]]:
    """Return the rules in the annotations of each flag, base classes first."""
    rules: dict[str, tuple[Any, ...]] = {}
    for cls in reversed(args_class.__mro__):
        declared = inspect.get_annotations(cls)
        hints = get_type_hints(cls, include_extras=True) if declared else {}  # annotations may be text
        for name in declared:
            rules[name] = rules.get(name, ()) + getattr(hints[name], "__metadata__", ())
    return rules


def harmless_flags(args_class: type) -> frozenset[str]:
    """Return the names of the flags that a resumed run may change."""
    return frozenset(name for name, rules in rules_of(args_class).items() if HARMLESS in rules)


def is_given(args: object, flag: str) -> bool:
    """True if the flag differs from its default."""
    return getattr(args, flag) != getattr(type(args), flag, dataclasses.MISSING)


def given_flags(args: object, *rules: Ignored) -> list[str]:
    """Return the names of the flags that the user gave and that have one of the rules."""
    found = rules_of(type(args))
    return [name for name in found if any(rule in found[name] for rule in rules) and is_given(args, name)]


def refuse_ignored(args: object, groups: Sequence[type] | None = None, *, in_run: bool = False) -> None:
    """Refuse flags of `groups` (None: all) that the user gave and that have no effect. Raises UserError.

    `in_run` applies only the rules marked `in_run`.
    """
    for name, rule in _rules(args, groups, Ignored):
        if rule.in_run == in_run and is_given(args, name) and rule.when(args):
            raise UserError(f"--{name} {rule.reason.format(flag=name, **vars(args))}.")


def check_groups(args: Any, groups: Sequence[type]) -> None:
    """Check each flag's range, then call `check` of each group, then refuse flags without effect. Raises UserError.

    From Python a whole number may be written 1e5; it becomes an int.
    """
    for name, flag in flags_of(type(args)).items():
        value, kinds = getattr(args, name), (flag.annotation, *typing.get_args(flag.annotation))
        if isinstance(value, float) and int in kinds and float not in kinds:
            if not value.is_integer():
                raise UserError(f"--{name} is {value}: it must be {flag.kind}.")
            object.__setattr__(args, name, int(value))  # the dataclass is frozen
    for name, rule in _rules(args, groups, Range):
        value = getattr(args, name)
        # From Python: the command line has converted it.
        if isinstance(value, str):
            raise UserError(f"--{name} is {value!r}: it must be {flags_of(type(args))[name].kind}.")
        if value is not None and not (math.isfinite(value) and rule.holds(value)):
            raise UserError(f"--{name} is {value}: {rule.reason.format(default=getattr(type(args), name))}.")
    for group in groups:
        if "check" in vars(group):
            group.check(args)
    refuse_ignored(args, groups)


def _rules(args: object, groups: Sequence[type] | None, kind: type[Rule]) -> Iterator[tuple[str, Rule]]:
    names = {name for group in groups or type(args).__mro__ for name in inspect.get_annotations(group)}
    for name, rules in rules_of(type(args)).items():
        yield from ((name, rule) for rule in rules if name in names and isinstance(rule, kind))


def check_conflict(args: object, first: str, second: str, reason: str) -> None:
    """Raise UserError if two flags that exclude each other, for a `reason`, are both given."""
    if getattr(args, first) and getattr(args, second):
        raise UserError(f"--{first} and --{second} exclude each other: {reason}.")
