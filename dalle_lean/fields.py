"""Checks the fields of settings against their annotations. Imports no torch: --help is fast.

text_len: Annotated[int, Range(1, 2**16)] = 256
conv_window: Annotated[str, ("centred", "corner")] = "centred"
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from math import inf
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dalle_lean.errors import UserError


@dataclass(frozen=True)
class Range:
    """The finite numbers that are at least `least`, at most `most`, above `above` and below `below`."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if -inf < self.least and self.most < inf:
            return f"in {self.least}..{self.most}"
        bounds = {"of at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if abs(bound) < inf)


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, below=1)]


def check(settings: Any, equals: str = "=") -> None:
    """UserError names the first field of a dataclass whose value does not fit its annotation.

    Numbers, choices, booleans, None, and tuples and unions of them are checked, other types are not. An int fits a
    float, and a bool fits neither.
    """
    for name, hint in hints_of(settings.__class__).items():
        if wanted := mismatch(value := getattr(settings, name), hint):
            raise UserError(f"{name}{equals}{value!r}: must be {wanted}")


@cache
def hints_of(section: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields; a field that a subclass gives another default of the same type keeps
    its range."""
    hints: dict[str, Any] = {}
    for base in reversed(section.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            if name not in hints or hint != bare(hints[name]):
                hints[name] = hint
    return {spec.name: hints[spec.name] for spec in dataclasses.fields(section)}


def bare(hint: Any) -> Any:
    """A type without its ranges and choices."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return bare(parts[0])
    if origin in (Union, UnionType):
        return Union[tuple(map(bare, parts))]  # noqa: UP007
    return tuple[tuple(map(bare, parts))] if origin is tuple else hint  # type: ignore[misc]


def mismatch(value: Any, hint: Any) -> str:
    """What a value of this type must be; empty if it is."""
    allowed: Any = None
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)[:2]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        options = [mismatch(value, part) for part in parts]
        # A command line and TOML have no word for None.
        return ", or ".join(words for words in options if words != "None") if all(options) else ""
    if origin is tuple:
        size = None if parts[-1] is Ellipsis else len(parts)
        fits = isinstance(value, tuple) and size in (None, len(value))
        if fits and not any(mismatch(item, parts[0 if size is None else at]) for at, item in enumerate(value)):
            return ""
        of, each = "" if size is None else f" of {size}", mismatch(None, parts[0])
        return f"a tuple{of}{each and f', each item {each}'}"
    choices = parts if origin is Literal else allowed
    if isinstance(choices, tuple):
        return "" if value in choices else f"one of {', '.join(choices)}"
    if hint is bool:
        return "" if isinstance(value, bool) else "true or false"
    if hint in (int, float):
        fits = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        if fits and (allowed is None or value in allowed):
            return ""
        if allowed is None:
            return "a whole number" if hint is int else "a number"
        return f"a {'whole' if hint is int else 'finite'} number {allowed}"
    return "None" if hint is type(None) and value is not None else ""
