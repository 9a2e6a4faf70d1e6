"""Training lengths in tokens (`--iters 10Btok`), converted to optimizer updates. Standard library only."""

import re
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from lm_experiments_tools.errors import UserError

_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)([kKMGBT]?)tok")


class Tokens(int):
    """A training length in tokens. Lengths in optimizer updates are plain ints."""

    def __repr__(self) -> str:
        return f"{int(self)}tok"

    __str__ = __repr__

    @classmethod
    def read(cls, text: str) -> "Tokens":
        """Parse 5000tok, 100Mtok or 2.5Btok. Raises ValueError for other text."""
        if (match := _TEXT.fullmatch(text)) is None:
            raise ValueError(text)
        return cls(Fraction(match[1]) * _UNITS[match[2]])


def lengths_in_tokens(args: Any) -> dict[str, Tokens]:
    """Return the flags whose values are lengths in tokens, with their values: {"iters": 10000000000tok}."""
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    return {name: value for name, value in values.items() if isinstance(value, Tokens)}


def in_updates(args: Any, world_size: int) -> Any:
    """Return the arguments with lengths in tokens replaced by optimizer updates, rounded up. Raises UserError.

    One update has `global_batch_size` x `input_seq_len` tokens, padding included. Options of `lr_scheduler_options`
    are replaced too.
    """
    lengths, options = lengths_in_tokens(args), args.lr_scheduler_options
    in_tokens = [option for option in options if _TEXT.fullmatch(option.partition("=")[2])]
    if not lengths and not in_tokens:
        return args
    if args.tokens_per_row() is None:
        raise UserError(f"{', '.join(in_tokens)}: rows have no fixed number of tokens here, so give updates.")
    per_update = args.global_batch_size(world_size) * args.tokens_per_row()

    def updates(tokens: int) -> int:
        return -(-tokens // per_update)

    def option_in_updates(option: str) -> str:
        name, _, value = option.partition("=")
        return f"{name}={updates(Tokens.read(value))}" if option in in_tokens else option

    changed: dict[str, Any] = {name: updates(tokens) for name, tokens in lengths.items()}
    if in_tokens:
        changed["lr_scheduler_options"] = tuple(map(option_in_updates, options))
    return replace(args, **changed)
