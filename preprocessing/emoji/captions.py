"""Captions, each true of the picture it is written for."""

from collections.abc import Sequence
from random import Random

from preprocessing.emoji.names import SYNONYMS, is_uncountable, plural, with_article

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
    "left of": ("left of", "to the left of", "next to", "beside", "near", "with", "and", "and", "and"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over", "on top of", "on"),
    "below": ("below", "under"),
}
"""Of the first thing to the second. Words that tell no side, such as "and", mean the order of reading."""
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SIZE_WORDS = {"small": ("small", "small", "little", "tiny"), "big": ("big", "big", "large", "huge", "giant")}
NUMBERS = {count: (word, word, word, str(count)) for count, word in ((2, "two"), (3, "three"), (4, "four"))}
COLOUR_SYNONYMS = {"grey": "gray", "purple": "violet", "yellow": "golden"}
SHARE_OF_SYNONYMS = 0.4  # of the captions of things that have any
SHARE_OF_COLOUR_SYNONYMS = 0.2
SHARE_WITHOUT_ARTICLE = 0.3


def noun_phrase(name: str, size: str | None = None) -> str:
    """A thing with its size, if given, and its article, if it has one: "a red heart", "a small owl", "big scissors"."""
    phrase = f"{size} {name}" if size else name
    return phrase if is_uncountable(name) else with_article(phrase)


def mention(name: str, random: Random, size: str | None = None, paint: str | None = None) -> str:
    """A thing as people type it: by its name or a synonym, with or without an article."""
    synonyms = SYNONYMS.get(name, ())
    if synonyms and random.random() < SHARE_OF_SYNONYMS:
        name = random.choice(synonyms)
    name = painted_name(name, paint, random)
    if random.random() < SHARE_WITHOUT_ARTICLE:
        return f"{size} {name}" if size else name
    return noun_phrase(name, size)


def painted_name(name: str, paint: str | None, random: Random) -> str:
    """A thing's name, singular or plural, after the colour in which it is painted, if any: "grey cat"."""
    if paint in COLOUR_SYNONYMS and random.random() < SHARE_OF_COLOUR_SYNONYMS:
        paint = COLOUR_SYNONYMS[paint]
    return f"{paint} {name}" if paint else name


def plain_caption(name: str, tags: Sequence[str], random: Random) -> str:
    """A caption of a thing alone on white; most are just the thing."""
    thing = mention(name, random)
    forms = [thing] * 6 + [f"a drawing of {thing}", f"a picture of {thing}", f"{thing} on a white ground"]
    if tags:
        forms.append(", ".join([name, *random.sample(tags, min(2, len(tags)))]))
    return random.choice(forms)


def on_ground(ground: str, random: Random, *paints: str | None) -> str:
    """Where things of these colours stand, such as " on a red ground". Half of the captions do not mention a ground
    that is white or behind white things, which would not be seen on white."""
    if (ground == "white" or "white" in paints) and random.random() < 0.5:
        return ""
    kind = random.choice(("ground", "background"))
    if random.random() < SHARE_WITHOUT_ARTICLE:
        return random.choice((f" on {ground}", f" on {ground} {kind}", f", {ground} {kind}"))
    return f" {random.choice(('on', 'on', 'with'))} {with_article(ground)} {kind}"


def scene_caption(
    name: str, ground: str, size: str | None, place: str, random: Random, paint: str | None = None
) -> str:
    """A caption of one thing on a ground; some captions mention its size and place."""
    mentioned_size = random.choice(SIZE_WORDS[size]) if size and random.random() < 0.5 else None
    where = PLACES[place] if random.random() < (0.15 if place == "centre" else 0.7) else None
    thing, on = mention(name, random, mentioned_size, paint), on_ground(ground, random, paint)
    if where is None:
        return f"{thing}{on}"
    return random.choice((f"{thing} {where}{on}", f"{thing}{on}, {where}"))


def pair_caption(
    first: str,
    second: str,
    relation: str,
    ground: str,
    random: Random,
    paints: tuple[str | None, str | None] = (None, None),
) -> str:
    """A caption of two things, `first` standing in `relation` to `second`, each painted in its colour of `paints`."""
    (first, paint), (second, other_paint) = zip((first, second), paints, strict=True)
    if random.random() < 0.5:
        first, paint, second, other_paint, relation = second, other_paint, first, paint, OPPOSITES[relation]
    words = random.choice(RELATIONS[relation])
    named = [mention(name, random, paint=colour) for name, colour in ((first, paint), (second, other_paint))]
    return f"{named[0]} {words} {named[1]}{on_ground(ground, random, paint, other_paint)}"


def count_caption(name: str, count: int, ground: str, random: Random, paint: str | None = None) -> str:
    """A caption of `count` of a thing that can be counted: "three red apples on a blue ground"."""
    synonyms = [many for synonym in SYNONYMS.get(name, ()) if (many := plural(synonym))]
    many = random.choice(synonyms) if synonyms and random.random() < SHARE_OF_SYNONYMS else plural(name)
    assert many is not None
    return f"{random.choice(NUMBERS[count])} {painted_name(many, paint, random)}{on_ground(ground, random, paint)}"
