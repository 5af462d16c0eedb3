"""What training never sees, chosen by hashes of names, so that the split is the same for every seed."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from preprocessing.emoji.names import contains_words
from preprocessing.emoji.sets import Drawing, Thing, by_thing

GROUNDS = {
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (250, 215, 50),
    "green": (50, 160, 70),
    "blue": (50, 100, 220),
    "purple": (130, 65, 180),
    "pink": (245, 150, 190),
    "brown": (125, 80, 50),
    "black": (25, 25, 25),
}
"""The named colours of grounds, RGB 0..255."""
PAINTS = {**GROUNDS, "white": (255, 255, 255), "grey": (105, 105, 105)}
"""The named colours of painted things. No held-out picture has white or grey things: on white and in shadows an
evaluation cannot tell these colours by pixels."""
WHITE_AND_GREY = tuple(paint for paint in PAINTS if paint not in GROUNDS)

OBJECT_GROUPS = ("animals-nature", "food-drink", "travel-places", "activities", "objects")
SCENE_GROUPS = (*OBJECT_GROUPS, "smileys-emotion", "people-body", "symbols", "shape")
NUM_CONCEPTS = 12
NUM_DRAWINGS = 240
SHARE_OF_GROUNDS = 0.04
SHARE_OF_PAINTS = 0.04
SHARE_OF_SHAPE_GROUNDS = 0.15
SHARE_OF_THING_PAIRS = 0.1


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The five kinds of pictures kept out of training."""

    concepts: frozenset[str] = frozenset()  # things that training neither sees, in any set, nor reads of
    drawings: frozenset[tuple[str, str]] = frozenset()
    """(thing, set): the drawing of one set; training sees the thing in other sets."""
    grounds: frozenset[tuple[str, str]] = frozenset()  # (thing, ground colour): training sees both, never together
    paints: frozenset[tuple[str, str]] = frozenset()
    """(thing, colour it is painted in): training sees both, never together."""

    def thing_pair(self, first: str, second: str) -> bool:
        """Whether training never shows two things side by side; true of one pair in ten."""
        return first != second and _unit_hash("thing pair", *sorted((first, second))) < SHARE_OF_THING_PAIRS

    def reason(self, things: Sequence[str], sets: Sequence[str], ground: str, paint: str | None = None) -> str | None:
        """The kind of held-out picture that a picture is, or None if training may show it."""
        if self.concepts.intersection(things):
            return "concept"
        if self.drawings.intersection(zip(things, sets, strict=True)):
            return "drawing"
        if self.grounds.intersection((thing, ground) for thing in things):
            return "ground"
        if self.paints.intersection((thing, paint) for thing in things):
            return "paint"
        if len(things) == 2 and self.thing_pair(*things):
            return "thing pair"
        return None

    def to_json(self) -> dict[str, Any]:
        """Sorted lists, for an evaluation to read."""
        return {
            "concepts": sorted(self.concepts),
            "drawings": [{"thing": thing, "set": name} for thing, name in sorted(self.drawings)],
            "grounds": [{"thing": thing, "ground": ground} for thing, ground in sorted(self.grounds)],
            "paints": [{"thing": thing, "paint": paint} for thing, paint in sorted(self.paints)],
        }


def hold_out(drawings: Sequence[Drawing]) -> HeldOut:
    """Choose what is held out among `drawings`."""
    things = by_thing(drawings)
    concepts = frozenset(name for (name,) in _choose("concept", _concept_candidates(things), NUM_CONCEPTS))
    seen = {name: versions for name, versions in things.items() if name not in concepts}
    one_set_each = [
        min(candidates, key=lambda pair: _unit_hash("drawing", *pair))
        for name, versions in seen.items()
        if (candidates := _drawing_candidates(name, versions))
    ]
    kept_out = frozenset((name, set_name) for name, set_name in _choose("drawing", one_set_each, NUM_DRAWINGS))
    grounds = frozenset(
        (name, ground)
        for name, versions in seen.items()
        for ground in allowed_grounds(versions[0].thing)
        if versions[0].thing.group in SCENE_GROUPS
        and _unit_hash("ground", name, ground)
        < (SHARE_OF_SHAPE_GROUNDS if versions[0].thing.group == "shape" else SHARE_OF_GROUNDS)
    )
    paints = frozenset(
        (name, paint)
        for name, versions in seen.items()
        for paint in allowed_paints(versions[0].thing)
        if paint not in WHITE_AND_GREY and _unit_hash("paint", name, paint) < SHARE_OF_PAINTS
    )
    return HeldOut(concepts=concepts, drawings=kept_out, grounds=grounds, paints=paints)


@cache
def allowed_grounds(thing: Thing) -> tuple[str, ...]:
    """The grounds on which a thing stands out: no colour in its name, and no yellow behind yellow faces and hands."""
    excluded = {"yellow"} if thing.group in ("smileys-emotion", "people-body") else set()
    return tuple(ground for ground in GROUNDS if ground not in excluded and not contains_words(thing.name, ground))


@cache
def allowed_paints(thing: Thing) -> tuple[str, ...]:
    """The colours in which a thing may be painted all over; none if its name has a colour in it."""
    words = (*PAINTS, "light", "dark")
    if thing.group not in OBJECT_GROUPS or any(contains_words(thing.name, word) for word in words):
        return ()
    return tuple(PAINTS)


def _concept_candidates(things: dict[str, list[Drawing]]) -> list[tuple[str, ...]]:
    """Things in all sets but one at most, with names of several words, which are seldom typed, that no other name
    contains, and with drawings of their own."""
    bodies = Counter(drawing.body for versions in things.values() for drawing in versions)
    most_sets = max(len(versions) for versions in things.values())
    candidates = [
        name
        for name, versions in things.items()
        if versions[0].thing.group in OBJECT_GROUPS
        and " " in name
        and len(versions) >= most_sets - 1
        and all(bodies[drawing.body] == 1 for drawing in versions)
    ]
    return [(name,) for name in candidates if not any(contains_words(other, name) for other in things if other != name)]


def _drawing_candidates(name: str, versions: list[Drawing]) -> list[tuple[str, ...]]:
    """(thing, set) pairs that may be held out. If both generations of noto draw it, neither: they may be alike."""
    sets = {drawing.set for drawing in versions}
    twins = {"noto", "noto-v1"} if {"noto", "noto-v1"} <= sets else set()
    if versions[0].thing.group not in OBJECT_GROUPS or len(sets) < 3:
        return []
    return [(name, set_name) for set_name in sorted(sets - twins)]


def _choose(purpose: str, candidates: list[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    """The first `count` candidates by hash, at most a quarter of them."""
    return sorted(candidates, key=lambda names: _unit_hash(purpose, *names))[: min(count, len(candidates) // 4)]


def _unit_hash(*names: str) -> float:
    """A hash of the names in [0, 1)."""
    return int.from_bytes(hashlib.sha256("|".join(names).encode()).digest()[:8], "big") / 2**64
