"""Sentences about pictures, each true of the picture it is written for."""

from collections.abc import Sequence
from random import Random

from preprocessing.emoji.names import PLAIN_WORDS, is_uncountable, with_article

PLACES = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "top left": "in the top left corner",
    "top right": "in the top right corner",
    "bottom left": "in the bottom left corner",
    "bottom right": "in the bottom right corner",
    "centre": "in the centre",
}

RELATIONS = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above",),
    "below": ("below",),
}
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
NUMBERS = {2: ("two", "2"), 3: ("three", "3"), 4: ("four", "4")}
SHARE_OF_PLAIN_WORDS = 0.3
"""Of the captions of things that have another plain word."""
SHARE_WITHOUT_ARTICLE = 0.3


def a(name: str, size: str | None = None) -> str:
    """The thing with its article and size, where there is one: "a red heart", "a small owl", "big scissors"."""
    return with_article(f"{size} {name}" if size else name, countable=not is_uncountable(name))


def said(name: str, random: Random, size: str | None = None, paint: str | None = None) -> str:
    """A thing as people type it: by its name or another word for it, with or without its article."""
    words = PLAIN_WORDS.get(name, ())
    if words and random.random() < SHARE_OF_PLAIN_WORDS:
        name = random.choice(words)
    name = f"{paint} {name}" if paint else name
    if random.random() < SHARE_WITHOUT_ARTICLE:
        return f"{size} {name}" if size else name
    return a(name, size)


def plain_caption(name: str, tags: Sequence[str], random: Random) -> str:
    """A caption of a thing alone on white; most are just the thing."""
    thing = said(name, random)
    forms = [thing] * 6 + [f"a drawing of {thing}", f"a picture of {thing}", f"{thing} on a white ground"]
    if tags:
        forms.append(", ".join([name, *random.sample(tags, min(2, len(tags)))]))
    return random.choice(forms)


def on_ground(ground: str, random: Random) -> str:
    """Where a thing stands: "on a red ground"; of a white ground nothing is said in half of the captions."""
    if ground == "white" and random.random() < 0.5:
        return ""
    kind = random.choice(("ground", "ground", "background"))
    if random.random() < SHARE_WITHOUT_ARTICLE:
        return random.choice((f" on {ground}", f" on {ground} {kind}", f", {ground} {kind}"))
    return f" on {with_article(ground)} {kind}"


def scene_caption(
    name: str, ground: str, size: str | None, place: str, random: Random, paint: str | None = None
) -> str:
    """A caption of one thing on a ground; size and place are told in some of them."""
    said_size = size if random.random() < 0.5 else None
    said_place = PLACES[place] if random.random() < (0.15 if place == "centre" else 0.7) else None
    thing, where = said(name, random, said_size, paint), on_ground(ground, random)
    if said_place is None:
        return f"{thing}{where}"
    return random.choice((f"{thing} {said_place}{where}", f"{thing}{where}, {said_place}"))


def pair_caption(first: str, second: str, relation: str, ground: str, random: Random) -> str:
    """A caption of two things, `first` standing in `relation` to `second`."""
    if random.random() < 0.5:
        first, second, relation = second, first, OPPOSITES[relation]
    beside = ("next to",) if relation in ("left of", "right of") else ()
    words = random.choice((*RELATIONS[relation] * 2, *beside, "and"))
    return f"{said(first, random)} {words} {said(second, random)}{on_ground(ground, random)}"


def count_caption(many: str, count: int, ground: str, random: Random) -> str:
    """A caption of several of one thing, whose plural is `many`: "three red apples on a blue ground"."""
    number = random.choice(NUMBERS[count][:1] * 3 + NUMBERS[count][1:])
    return f"{number} {many}{on_ground(ground, random)}"
