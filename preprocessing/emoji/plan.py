"""Which pictures the set has: how many of each kind for training, and all that is held out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

from preprocessing.emoji.fillers import as_typed
from preprocessing.emoji.heldout import SCENE_GROUPS, WHITE_AND_GREY, HeldOut, allowed_grounds, allowed_paints
from preprocessing.emoji.names import contains_words, plural
from preprocessing.emoji.scenes import Picture, pair, plain, scene, several
from preprocessing.emoji.sets import Drawing, Thing, by_thing

COPIES = {
    "plain": 10,
    "scene": 40,
    "painted": 18,
    "painted-white-or-grey": 0,
    "pair": 14,
    "count": 9,
    "painted-pair": 12,
    "painted-count": 9,
}
"""Training pictures of each kind of a thing: of a pair it is the first; painted, if it may be, in its colours by
turns, white and grey among them; painted-white-or-grey: so many more in these two."""
SHARE_OF_TWINS = 0.3  # of the painted pairs: one thing in two colours
SHARE_PAINTED = 0.7  # of the second things of the other painted pairs
SHAPE_COPIES = 4  # coloured shapes, of which there are few, have so many times as many


def plan_training(
    drawings: Sequence[Drawing],
    held_out: HeldOut,
    seed: int,
    copies: Mapping[str, int] = COPIES,
    fillers: float = 0.0,
) -> list[Picture]:
    """Every training picture, shuffled; `copies` says how many of each kind a thing has, `fillers` which share of the
    captions has words that the picture does not show."""
    pictures: list[Picture] = []
    known = [d for d in drawings if held_out.reason([d.thing.name], [d.set], "white") is None]
    shapes = [d for d in known if d.thing.group == "shape"]
    for drawing in known:
        name = drawing.thing.name
        random = Random(f"{seed}/train/{drawing.set}/{name}")
        times = SHAPE_COPIES if drawing.thing.group == "shape" else 1
        tags = safe_tags(drawing.thing, held_out)
        grounds = known_grounds(drawing.thing, held_out)
        on_white = grounds if contains_words(name, "white") else [*grounds, "white"]
        pictures += [plain(drawing, tags, random) for _ in range(times * copies["plain"])]
        pictures += [scene(drawing, ground, random) for ground in cycled(on_white, times * copies["scene"], random)]
        for _ in range(times * copies["pair"]):
            # Of coloured shapes pixels alone can tell which stands where, so half of theirs are with another shape.
            second = random.choice(shapes if drawing.thing.group == "shape" and random.random() < 0.5 else known)
            shared = [g for g in on_white if g == "white" or g in allowed_grounds(second.thing)]
            picture = pair(drawing, second, random.choice(shared), random) if shared else None
            different = drawing.thing != second.thing
            if picture and different and held_out.reason(picture.things, picture.sets, picture.ground) is None:
                pictures.append(picture)
        if plural(name):
            grounds_of_counts = cycled(on_white, times * copies["count"], random)
            pictures += [several(drawing, 2 + i % 3, ground, random) for i, ground in enumerate(grounds_of_counts)]
        paints = known_paints(drawing.thing, held_out)
        random = Random(f"{seed}/painted/{drawing.set}/{name}")
        pictures += painted(drawing, paints, held_out, copies["painted"], random)
        random = Random(f"{seed}/painted white or grey/{drawing.set}/{name}")
        white_and_grey = [paint for paint in paints if paint in WHITE_AND_GREY]
        pictures += painted(drawing, white_and_grey, held_out, copies["painted-white-or-grey"], random)
        random = Random(f"{seed}/painted pairs/{drawing.set}/{name}")
        pictures += painted_pairs(drawing, known, held_out, copies["painted-pair"], random)
        random = Random(f"{seed}/painted counts/{drawing.set}/{name}")
        pictures += painted_counts(drawing, held_out, copies["painted-count"], random)
    Random(f"{seed}/order").shuffle(pictures)
    random, names = Random(f"{seed}/fillers"), [drawing.thing.name for drawing in known]
    return [
        replace(picture, text=as_typed(picture.text, names, random)) if random.random() < fillers else picture
        for picture in pictures
    ]


def painted(
    drawing: Drawing, paints: Sequence[str], held_out: HeldOut, count: int, random: Random
) -> Iterator[Picture]:
    """A drawing in each of the colours by turns, on grounds that it may have with them."""
    for i, paint in enumerate(cycled(paints, count, random)):
        yield scene(drawing, ground_behind(drawing.thing, paint, held_out, i, random), random, paint)


def painted_pairs(
    drawing: Drawing, known: Sequence[Drawing], held_out: HeldOut, count: int, random: Random
) -> Iterator[Picture]:
    """A drawing in one of its colours beside itself in another, or beside one of `known`, painted or not."""
    for i, paint in enumerate(cycled(known_paints(drawing.thing, held_out), count, random)):
        twin = random.random() < SHARE_OF_TWINS
        second = drawing if twin else random.choice(known)
        others = [other for other in known_paints(second.thing, held_out) if other != paint]
        other = random.choice(others) if others and (twin or random.random() < SHARE_PAINTED) else None
        if second == drawing and other is None:
            continue
        of_second = known_grounds(second.thing, held_out)
        shared = [g for g in known_grounds(drawing.thing, held_out) if g in of_second and g not in (paint, other)]
        has_white = "white" in (paint, other) or contains_words(second.thing.name, "white")
        ground = random.choice(shared) if shared and (has_white or i % 2) else "white"
        if ground == "white" and has_white:
            continue
        picture = pair(drawing, second, ground, random, (paint, other))
        if held_out.reason(picture.things, picture.sets, ground) is None:
            yield picture


def painted_counts(drawing: Drawing, held_out: HeldOut, count: int, random: Random) -> Iterator[Picture]:
    """Two to four of a drawing, if it can be counted, all in one of its colours."""
    if plural(drawing.thing.name) is None:
        return
    for i, paint in enumerate(cycled(known_paints(drawing.thing, held_out), count, random)):
        yield several(drawing, 2 + i % 3, ground_behind(drawing.thing, paint, held_out, i, random), random, paint)


def ground_behind(thing: Thing, paint: str, held_out: HeldOut, i: int, random: Random) -> str:
    """The ground of painted picture `i` of a thing: every second one is white, but never of its own colour."""
    if i % 2 and paint != "white":
        return "white"
    return random.choice([ground for ground in known_grounds(thing, held_out) if ground != paint])


def plan_held_out(drawings: Sequence[Drawing], held_out: HeldOut, seed: int, num_pairs: int = 400) -> list[Picture]:
    """Held-out pictures, each with the one reason why it is out of training."""
    return [
        replace(picture, held_out=held_out.reason(picture.things, picture.sets, picture.ground, picture.paint))
        for picture in _held_out_pictures(drawings, held_out, seed, num_pairs)
    ]


def _held_out_pictures(drawings: Sequence[Drawing], held_out: HeldOut, seed: int, num_pairs: int) -> Iterator[Picture]:
    known = by_thing(d for d in drawings if (d.thing.name, d.set) not in held_out.drawings)
    for drawing in drawings:
        name = drawing.thing.name
        random = Random(f"{seed}/held out/{drawing.set}/{name}")
        reason = held_out.reason([name], [drawing.set], "white")
        if reason:
            tags = drawing.thing.tags if reason == "concept" else safe_tags(drawing.thing, held_out)
            yield plain(drawing, tags, random)
            grounds = known_grounds(drawing.thing, held_out)
            for ground in cycled(grounds, 2 if reason == "concept" else 1, random):
                yield scene(drawing, ground, random)
    for name, ground in sorted(held_out.grounds):
        random = Random(f"{seed}/held out/{name}/{ground}")
        for drawing in random.sample(known[name], min(2, len(known[name]))):
            yield scene(drawing, ground, random)
    for name, paint in sorted(held_out.paints):
        random = Random(f"{seed}/held out/painted/{name}/{paint}")
        grounds = [ground for ground in known_grounds(known[name][0].thing, held_out) if ground != paint]
        yield scene(random.choice(known[name]), random.choice([*grounds, "white"]), random, paint)
        random = Random(f"{seed}/held out/painted count/{name}/{paint}")
        if plural(name):
            ground = random.choice([*grounds, "white"])
            yield several(random.choice(known[name]), random.choice((2, 3, 4)), ground, random, paint)
    yield from _held_out_pairs(drawings, held_out, seed, num_pairs)


def _held_out_pairs(drawings: Sequence[Drawing], held_out: HeldOut, seed: int, num_pairs: int) -> Iterator[Picture]:
    random = Random(f"{seed}/held out/pairs")
    known = [
        d
        for d in drawings
        if d.thing.group in SCENE_GROUPS and held_out.reason([d.thing.name], [d.set], "white") is None
    ]
    shapes = [d for d in known if d.thing.group == "shape"]
    for candidates in [known] * num_pairs + [shapes or known] * num_pairs:
        first = random.choice(candidates)
        name = first.thing.name
        second = next((d for d in random.choices(candidates, k=200) if held_out.thing_pair(name, d.thing.name)), first)
        if second.thing.name == name:
            continue
        of_second = known_grounds(second.thing, held_out)
        shared = [ground for ground in known_grounds(first.thing, held_out) if ground in of_second]
        yield pair(first, second, random.choice([*shared, "white"]), random)
        paints_of_second = known_paints(second.thing, held_out)
        paints = [
            paint
            for paint in known_paints(first.thing, held_out)
            if paint in paints_of_second and paint not in WHITE_AND_GREY
        ]
        if len(paints) >= 2:
            of_paints = Random(f"{seed}/held out/painted pair/{name}/{second.thing.name}")
            first_paint, second_paint = of_paints.sample(paints, 2)
            yield pair(first, second, "white", of_paints, (first_paint, second_paint))


def known_paints(thing: Thing, held_out: HeldOut) -> list[str]:
    """The colours in which training may paint a thing."""
    return [paint for paint in allowed_paints(thing) if (thing.name, paint) not in held_out.paints]


def known_grounds(thing: Thing, held_out: HeldOut) -> list[str]:
    """The grounds that training may show behind a thing."""
    return [ground for ground in allowed_grounds(thing) if (thing.name, ground) not in held_out.grounds]


@cache
def safe_tags(thing: Thing, held_out: HeldOut) -> tuple[str, ...]:
    """A thing's tags without the words of held-out concepts."""
    return tuple(tag for tag in thing.tags if not any(contains_words(tag, name) for name in held_out.concepts))


def cycled(colours: Sequence[str], count: int, random: Random) -> list[str]:
    """`count` colours, each as often as the others; none of none."""
    order = random.sample(colours, len(colours))
    return [order[i % len(order)] for i in range(count)] if order else []
