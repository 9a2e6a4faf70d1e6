"""Flags made from the fields of a dataclass: types, defaults, help texts. Standard library only."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from itertools import pairwise
from typing import Any, Literal

from lm_experiments_tools.config.flags import help_groups

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NULL_WORDS = ("null", "none", "~", "")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a dataclass of arguments, as a flag.

    Attributes:
        annotation: bool, int, float, str, a Literal, one of these or None, or a tuple of any number of one of these.
        default: `dataclasses.MISSING` if the flag is required.
        group: the class that declares the field, for `--help`.
    """

    name: str
    annotation: Any
    default: Any
    group: type

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.annotation) is tuple

    @property
    def takes_none(self) -> bool:
        return type(None) in typing.get_args(self.annotation)

    def read(self, text: str) -> Any:
        """The value that a text stands for; of a list, the value of one item.

        Raises:
            ValueError: the flag takes no such value.
        """
        item = typing.get_args(self.annotation)[0] if self.is_list else self.annotation
        try:
            return _value(text, item)
        except ValueError:
            raise ValueError(f"takes {describe(self.annotation)}, not {text!r}") from None

    def names(self) -> list[str]:
        """The flag, and the one that turns off a boolean."""
        return [f"--{self.name}", *([f"--no_{self.name}"] if self.annotation is bool else [])]


def _value(text: str, annotation: Any) -> Any:
    """`text` as a value of a type. Raises ValueError."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return options[list(map(str, options)).index(text)]
    if type(None) in options:
        (kind,) = (option for option in options if option is not type(None))
        is_null = text == "None" if kind is str else text.lower() in NULL_WORDS
        return None if is_null else _value(text, kind)
    if annotation is bool:
        return (*FALSE_WORDS, *TRUE_WORDS).index(text.lower()) >= len(FALSE_WORDS)
    return annotation(text)


def describe(annotation: Any) -> str:
    """A type in words."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, options))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(map(describe, options))
    if typing.get_origin(annotation) is tuple:
        return f"a list, each {describe(options[0])}"
    return _WORDS[annotation]


def flags_of(*args_classes: type) -> dict[str, Flag]:
    """The flags of dataclasses by name, group after group."""
    flags = {}
    for args_class in args_classes:
        types_by_name = typing.get_type_hints(args_class)
        group_of = {name: group for group in help_groups(args_class) for name in inspect.get_annotations(group)}
        for field in dataclasses.fields(args_class):
            group = group_of.get(field.name, args_class)
            flags[field.name] = Flag(field.name, types_by_name[field.name], field.default, group)
    return flags


def help_texts(args_class: type) -> dict[str, str]:
    """The string under each field in the source of a class, on one line; else the `help` of the field's metadata.

    A class that repeats a field may have a text of its own; otherwise the text of the declaring class stays.
    """
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
