"""Fields of settings are what their annotations say, or named with their value."""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from dalle_lean.errors import UserError
from dalle_lean.fields import PositiveInt, Range, Share, check

COLOURS = ("red", "green")


@dataclass(frozen=True)
class Settings:
    size: Annotated[int, Range(1, 8)] = 1
    count: PositiveInt | None = None
    share: Share = 0.5
    rate: Annotated[float, Range(above=0, most=2)] = 1.0
    free: float = float("inf")
    flag: bool = False
    colour: Annotated[str, COLOURS] = "red"
    kind: Literal["vq", "gumbel"] = "vq"
    sides: tuple[PositiveInt, ...] = ()
    stage: tuple[PositiveInt, PositiveInt] = (1, 2)
    names: tuple[str, ...] = ()
    note: Any = None
    either: PositiveInt | Literal["all"] | None = None


@dataclass(frozen=True)
class OtherDefaults(Settings):
    size: int = 2
    rate: Annotated[float, Range(0)] = 0
    count: int | None = 2
    stage: tuple[int, int] = (1, 1)
    free: Share | None = None  # type: ignore[assignment]


def test_what_fits_is_taken():
    check(Settings())
    check(Settings(size=8, count=10**9, share=0, rate=2, sides=(1, 2, 3), note=object()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 9}, "size=9: must be a whole number in 1..8"),
        ({"size": True}, "size=True: must be a whole number in 1..8"),
        ({"size": 1.0}, "size=1.0: must be a whole number in 1..8"),
        ({"count": 0}, "count=0: must be a whole number of at least 1"),
        ({"either": 0}, "either=0: must be a whole number of at least 1, or one of all"),
        ({"share": 1}, "share=1: must be a finite number of at least 0 and below 1"),
        ({"share": float("nan")}, "share=nan: must be a finite number of at least 0 and below 1"),
        ({"rate": 0.0}, "rate=0.0: must be a finite number above 0 and at most 2"),
        ({"free": "1"}, "free='1': must be a number"),
        ({"flag": 1}, "flag=1: must be true or false"),
        ({"colour": ["red"]}, "colour=['red']: must be one of red, green"),
        ({"kind": "lfq"}, "kind='lfq': must be one of vq, gumbel"),
        ({"sides": (1, 0)}, "sides=(1, 0): must be a tuple, each item a whole number of at least 1"),
        ({"sides": [1]}, "sides=[1]: must be a tuple, each item a whole number of at least 1"),
        ({"names": ["x"]}, "names=['x']: must be a tuple"),
        ({"stage": (1,)}, "stage=(1,): must be a tuple of 2, each item a whole number of at least 1"),
    ],
)
def test_what_does_not_fit_is_named_with_its_value(changes, message):
    with pytest.raises(UserError) as caught:
        check(replace(Settings(), **changes))
    assert str(caught.value) == message


def test_the_message_is_written_as_the_file_is():
    with pytest.raises(UserError, match="size = 0: must be"):
        check(Settings(size=0), " = ")


def test_another_default_keeps_the_range_and_another_range_replaces_it():
    check(OtherDefaults(rate=5))
    for changes, message in (
        ({"size": 9}, "size=9: must be a whole number in 1..8"),
        ({"count": 0}, "count=0: must be a whole number of at least 1"),
        ({"stage": (0, 1)}, "stage=(0, 1): must be a tuple of 2"),
        ({"free": 2}, "free=2: must be a finite number of at least 0 and below 1"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            check(OtherDefaults(**changes))
