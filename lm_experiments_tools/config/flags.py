"""Notes on flags, which stand in the type of a field, and the one check that reads them.

    log_interval: Annotated[int, HARMLESS, COUNT] = 10                     a resumed run may change it; from 1 on
    min_loss_scale: Annotated[float | None, needs("fp16")] = None          refused where --fp16 is not given

`Annotated` and not the metadata of `dataclasses.field`, because argparse gets the latter from `HfArgumentParser`, and
refuses keys that it does not know. Standard library only.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, get_type_hints

from lm_experiments_tools.errors import UserError

Rule = TypeVar("Rule")


class Harmless:
    """A resumed run may change the flag: it alters neither the model, nor the data, nor the updates made so far."""


HARMLESS = Harmless()


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a flag may have besides None; NaN and infinity are never among them.

    Attributes:
        holds: True of a value in the range.
        reason: the end of a sentence that refuses another one, with the flag's {default}.
    """

    holds: Callable[[Any], bool]
    reason: str


def at_least(minimum: float) -> Range:
    """Values from `minimum` on."""
    return Range(lambda value: value >= minimum, f"it must be at least {minimum:g}")


COUNT, NOT_NEGATIVE = at_least(1), at_least(0)
POSITIVE = Range(lambda value: value > 0, "it must be above 0 and finite")
PART = Range(lambda value: 0 < value < 1, "it must lie between 0 and 1, for example {default}")
FRACTION = Range(lambda value: 0 <= value <= 1, "it is a fraction, from 0 to 1")
DROPOUT = Range(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True, eq=False)
class Unread:
    """A flag that has no effect beside some others: given all the same, it is refused.

    Attributes:
        when: True of arguments that do not read the flag.
        reason: the sentence from the flag on, with {flag} and any argument in braces.
        in_run: True for a flag that only a run of these arguments does not read: `check_used` refuses it, and
            `FineTuner`, which may read it later, accepts it.
    """

    when: Callable[[Any], bool]
    reason: str
    in_run: bool = False


def needs(other: str, reason: str | None = None) -> Unread:
    """`Unread` without the flag `other`."""
    reason = reason or f"is about --{other}, which is not given: add it, or leave --{{flag}} out"
    return Unread(lambda args: not getattr(args, other), reason)


def only(other: str, *values: str, reason: str | None = None) -> Unread:
    """`Unread` where the flag `other` has none of these values."""
    mend = f"add --{other} {values[0]}, or leave --{{flag}} out" if len(values) == 1 else "leave it out"
    reason = reason or f"is read by --{other} {', '.join(values)} alone, and --{other} is {{{other}}}: {mend}"
    return Unread(lambda args: getattr(args, other) not in values, reason)


@functools.cache
def notes_of(args_class: type) -> dict[str, tuple[Any, ...]]:
    """The notes on each flag: those of the class that declares it, then those of classes below that repeat it."""
    notes: dict[str, tuple[Any, ...]] = {}
    for cls in reversed(args_class.__mro__):
        own = inspect.get_annotations(cls)
        types = get_type_hints(cls, include_extras=True) if own else {}  # annotations may be text
        for name in own:
            notes[name] = notes.get(name, ()) + getattr(types[name], "__metadata__", ())
    return notes


def harmless_flags(args_class: type) -> frozenset[str]:
    """Names of the flags that a resumed run may change."""
    return frozenset(name for name, notes in notes_of(args_class).items() if HARMLESS in notes)


def is_given(args: object, flag: str) -> bool:
    """True if the flag differs from its default."""
    return getattr(args, flag) != getattr(type(args), flag)


def given_flags(args: object, *rules: Unread) -> list[str]:
    """Names of the flags in use that one of `rules` is about."""
    notes = notes_of(type(args))
    return [name for name in notes if any(rule in notes[name] for rule in rules) and is_given(args, name)]


def refuse_unread(args: object, groups: Sequence[type] | None = None, *, in_run: bool = False) -> None:
    """Refuse flags that are given and have no effect.

    Args:
        groups: the classes whose flags are looked at; all by default.
        in_run: look at the rules about a run alone, instead of the others.

    Raises:
        UserError: a flag without effect, and why.
    """
    for name, rule in _rules(args, groups, Unread):
        if rule.in_run == in_run and is_given(args, name) and rule.when(args):
            raise UserError(f"--{name} {rule.reason.format(flag=name, **vars(args))}.")


def check_groups(args: Any, groups: Sequence[type]) -> None:
    """Check each flag of these groups by itself, then beside the others, then that it has an effect.

    Raises:
        UserError: a value out of range, or flags in conflict.
    """
    for name, rule in _rules(args, groups, Range):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and rule.holds(value)):
            raise UserError(f"--{name} is {value}: {rule.reason.format(default=getattr(type(args), name))}.")
    for group in groups:
        if "check" in vars(group):
            group.check(args)
    refuse_unread(args, groups)


def _rules(args: object, groups: Sequence[type] | None, kind: type[Rule]) -> Iterator[tuple[str, Rule]]:
    """The notes of one kind on the flags of some classes."""
    of_groups = {name for group in groups or type(args).__mro__ for name in inspect.get_annotations(group)}
    for name, notes in notes_of(type(args)).items():
        yield from ((name, note) for note in notes if name in of_groups and isinstance(note, kind))


def help_groups(args_class: type) -> list[type]:
    """The dataclasses that declare the fields of `args_class`, in the order of its fields.

    A class lower down may repeat a field to change its default; a new field belongs in a group of its own.
    """
    bases = [cls for cls in reversed(args_class.__mro__) if inspect.get_annotations(cls)]
    return [cls for cls in bases if not any(issubclass(cls, other) for other in bases if other is not cls)]


def check_minimum(args: object, minimum: float, *flags: str) -> None:
    """Refuse a flag below `minimum`, NaN or infinite; None passes."""
    for flag in flags:
        value = getattr(args, flag)
        if value is not None and not (value >= minimum and math.isfinite(value)):
            raise UserError(f"--{flag} is {value}: it must be at least {minimum:g}.")


def check_conflict(args: object, first: str, second: str, reason: str) -> None:
    """Refuse two flags that are both in use."""
    if getattr(args, first) and getattr(args, second):
        raise UserError(f"--{first} and --{second} exclude each other: {reason}.")
