"""Pictures before they are drawn: things, sizes, places, grounds, and captions that are true of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from preprocessing.emoji.captions import pair_caption, plain_caption, scene_caption
from preprocessing.emoji.heldout import GROUNDS
from preprocessing.emoji.sets import Drawing

GROUND_JITTER = 8
"""Each channel of a ground moves by at most this much."""

PLACE_CENTRES = {
    "left": (0.0, 0.5),
    "right": (1.0, 0.5),
    "top": (0.5, 0.0),
    "bottom": (0.5, 1.0),
    "top left": (0.0, 0.0),
    "top right": (1.0, 0.0),
    "bottom left": (0.0, 1.0),
    "bottom right": (1.0, 1.0),
}
"""Where a thing stands between touching one edge (0) and the other (1), across and down."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One drawing in a picture; lengths are shares of the picture's side."""

    drawing: Drawing
    scale: float
    """Longer side of what is drawn."""
    centre: tuple[float, float]
    """Across from the left and down from the top."""
    paint: str | None = None
    """The colour in which all of it is painted, one of GROUNDS; None: its own colours."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture to draw, and what is true of it."""

    kind: str
    """"plain", "scene", "painted" or "pair"."""
    text: str
    placed: tuple[Placed, ...]
    ground: str
    ground_rgb: tuple[int, int, int]
    size: str | None
    place: str | None
    held_out: str | None = None

    @property
    def things(self) -> list[str]:
        """The names of the things shown."""
        return [placed.drawing.thing.name for placed in self.placed]

    @property
    def sets(self) -> list[str]:
        """The sets whose drawings show them."""
        return [placed.drawing.set for placed in self.placed]

    @property
    def paint(self) -> str | None:
        """The colour in which the first thing is painted."""
        return self.placed[0].paint

    def facts(self) -> dict[str, Any]:
        """The picture's line in metadata.jsonl, without its file name."""
        return {
            "text": self.text,
            "kind": self.kind,
            "things": self.things,
            "sets": self.sets,
            "ground": self.ground,
            "paint": self.paint,
            "size": self.size,
            "place": self.place,
            "held_out": self.held_out,
        }


def plain(drawing: Drawing, tags: Sequence[str], random: Random) -> Picture:
    """A thing alone on white, nearly filling the picture."""
    scale = random.uniform(0.8, 0.96)
    slack = (1 - scale) / 2
    centre = (0.5 + random.uniform(-slack, slack), 0.5 + random.uniform(-slack, slack))
    return Picture(
        kind="plain",
        text=plain_caption(drawing.thing.name, tags, random),
        placed=(Placed(drawing=drawing, scale=scale, centre=centre),),
        ground="white",
        ground_rgb=(255, 255, 255),
        size=None,
        place=None,
    )


def scene(drawing: Drawing, ground: str, random: Random, paint: str | None = None) -> Picture:
    """A thing on a coloured ground: a big one in the centre, others anywhere; `paint` is the colour of all of it."""
    size = random.choice(("small", "big", None))
    place = "centre" if size == "big" or random.random() < 0.35 else random.choice(list(PLACE_CENTRES))
    unsized = (0.5, 0.65) if place == "centre" else (0.42, 0.52)
    scale = random.uniform(*{"small": (0.3, 0.4), "big": (0.7, 0.82), None: unsized}[size])
    across, down = PLACE_CENTRES.get(place, (0.5, 0.5))
    margin = scale / 2 + 0.03
    centre = tuple(margin + where * (1 - 2 * margin) + random.uniform(-0.02, 0.02) for where in (across, down))
    name = f"{paint} {drawing.thing.name}" if paint else drawing.thing.name
    return Picture(
        kind="painted" if paint else "scene",
        text=scene_caption(name, ground, size, place, random),
        placed=(Placed(drawing=drawing, scale=scale, centre=(centre[0], centre[1]), paint=paint),),
        ground=ground,
        ground_rgb=jittered(ground, random),
        size=size,
        place=place,
    )


def pair(first: Drawing, second: Drawing, ground: str, random: Random) -> Picture:
    """Two things side by side or one above the other; `place` tells where the first stands."""
    relation = random.choice(("left of", "right of", "left of", "right of", "above", "below"))
    near, far = random.uniform(0.25, 0.28), random.uniform(0.72, 0.75)
    along = (near, far) if relation in ("left of", "above") else (far, near)
    placed = []
    for drawing, position in zip((first, second), along, strict=True):
        across = 0.5 + random.uniform(-0.06, 0.06)
        centre = (position, across) if relation.endswith("of") else (across, position)
        placed.append(Placed(drawing=drawing, scale=random.uniform(0.36, 0.46), centre=centre))
    return Picture(
        kind="pair",
        text=pair_caption(first.thing.name, second.thing.name, relation, ground, random),
        placed=tuple(placed),
        ground=ground,
        ground_rgb=jittered(ground, random),
        size=None,
        place=relation,
    )


def jittered(ground: str, random: Random) -> tuple[int, int, int]:
    """A ground's colour, moved a little; white stays white."""
    if ground == "white":
        return (255, 255, 255)
    red, green, blue = (
        min(255, max(0, channel + random.randint(-GROUND_JITTER, GROUND_JITTER))) for channel in GROUNDS[ground]
    )
    return (red, green, blue)
