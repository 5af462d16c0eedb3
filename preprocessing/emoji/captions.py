"""Sentences about pictures, each true of the picture it is written for."""

from collections.abc import Sequence
from random import Random

from preprocessing.emoji.names import is_uncountable, with_article

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


def a(name: str, size: str | None = None) -> str:
    """The thing with its article and, if told, its size: "a red heart", "a small owl", "big scissors"."""
    return with_article(f"{size} {name}" if size else name, countable=not is_uncountable(name))


def plain_caption(name: str, tags: Sequence[str], random: Random) -> str:
    """A caption of a thing alone on white; about half are just the thing."""
    forms = [a(name)] * 5 + [f"a drawing of {a(name)}", f"a picture of {a(name)}", f"{a(name)} on a white ground"]
    if tags:
        forms.append(", ".join([name, *random.sample(tags, min(2, len(tags)))]))
        forms.append(f"{a(name)}, {random.choice(tags)}")
    return random.choice(forms)


def scene_caption(name: str, ground: str, size: str | None, place: str, random: Random) -> str:
    """A caption of one thing on a coloured ground; size and place are told in some of them."""
    said_size = size if random.random() < 0.5 else None
    said_place = PLACES[place] if random.random() < (0.15 if place == "centre" else 0.6) else None
    on = f"on {with_article(ground)} {'ground' if random.random() < 0.8 else 'background'}"
    thing = a(name, said_size)
    if said_place is None:
        return f"{thing} {on}"
    return random.choice((f"{thing} {said_place} {on}", f"{thing} {on}, {said_place}"))


def pair_caption(first: str, second: str, relation: str, ground: str, random: Random) -> str:
    """A caption of two things, `first` standing in `relation` to `second`."""
    if random.random() < 0.5:
        first, second, relation = second, first, OPPOSITES[relation]
    beside = ("next to",) if relation in ("left of", "right of") else ()
    words = random.choice((*RELATIONS[relation] * 2, *beside, "and"))
    if ground == "white" or random.random() < 0.2:
        return f"{a(first)} {words} {a(second)}"
    return f"{a(first)} {words} {a(second)} on {with_article(ground)} ground"
