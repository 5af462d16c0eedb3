"""Pictures before they are drawn: things, sizes, places, grounds, and captions that are true of them.

Lengths are in cells, sixteenths of a picture's side: in a picture of 128 pixels a cell is the patch of one code of an
f=8 VQGAN, so that a thing of one size is always cut into the same patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from preprocessing.emoji.captions import count_caption, pair_caption, plain_caption, scene_caption
from preprocessing.emoji.heldout import GROUNDS
from preprocessing.emoji.sets import Drawing

CELLS = 16
SIZES = {"small": 6, "big": 12}
"""Cells of the square box that a thing fills, by the word for it. Each size of a thing has to be learnt alone."""
WHITE = (255, 255, 255)

PLACE_SHIFTS = {
    "centre": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}
"""Across and down from the centre, in cells times SHIFT_CELLS."""
SHIFT_CELLS = 4
SHARE_BIG = 0.6  # of the things that stand alone; those always stand in the centre
SHARE_IN_CENTRE = 0.25  # of the small ones

PAIR_CORNERS = {
    "left of": ((1, 5), (9, 5)),
    "right of": ((9, 5), (1, 5)),
    "above": ((5, 1), (5, 9)),
    "below": ((5, 9), (5, 1)),
}
COUNT_CORNERS = {
    2: ((1, 5), (9, 5)),
    3: ((1, 1), (9, 1), (5, 9)),
    4: ((1, 1), (9, 1), (1, 9), (9, 9)),
}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One drawing in a picture."""

    drawing: Drawing
    cells: int  # width and height of the box that it fills, all but a pixel or two
    corner: tuple[int, int]  # top left cell of the box: across and down
    paint: str | None = None  # the colour in which all of it is painted, one of PAINTS; None: its own colours


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture to draw, and what is true of it."""

    kind: str
    """One of `plan.COPIES`."""
    text: str
    placed: tuple[Placed, ...]
    ground: str
    size: str | None
    place: str | None
    held_out: str | None = None

    @property
    def ground_rgb(self) -> tuple[int, int, int]:
        """The ground's exact colour."""
        return GROUNDS.get(self.ground, WHITE)

    @property
    def things(self) -> list[str]:
        """The names of the things shown, each once."""
        return list(dict.fromkeys(placed.drawing.thing.name for placed in self.placed))

    @property
    def sets(self) -> list[str]:
        """For each of the things the set whose drawing shows it."""
        return list({placed.drawing.thing.name: placed.drawing.set for placed in self.placed}.values())

    @property
    def paint(self) -> str | None:
        """The colour in which the first thing is painted."""
        return self.paints[0]

    @property
    def paints(self) -> list[str | None]:
        """The colours in which things are painted, each once; None stands for a thing's own colours."""
        return list(dict.fromkeys(placed.paint for placed in self.placed))

    def facts(self) -> dict[str, Any]:
        """The picture's line in metadata.jsonl, without its file name."""
        return {
            "text": self.text,
            "kind": self.kind,
            "things": self.things,
            "sets": self.sets,
            "count": len(self.placed),
            "ground": self.ground,
            "paint": self.paint,
            "paints": self.paints,
            "size": self.size,
            "place": self.place,
            "held_out": self.held_out,
        }


def plain(drawing: Drawing, tags: Sequence[str], random: Random) -> Picture:
    """A thing alone on white, big."""
    return Picture(
        kind="plain",
        text=plain_caption(drawing.thing.name, tags, random),
        placed=(at(drawing, "big", "centre"),),
        ground="white",
        size="big",
        place="centre",
    )


def scene(drawing: Drawing, ground: str, random: Random, paint: str | None = None) -> Picture:
    """A thing on a ground: a big one in the centre, others there or elsewhere; `paint` is the colour of all of it."""
    size = "big" if random.random() < SHARE_BIG else "small"
    centred = size == "big" or random.random() < SHARE_IN_CENTRE
    place = "centre" if centred else random.choice(list(PLACE_SHIFTS)[1:])
    return Picture(
        kind="painted" if paint else "scene",
        text=scene_caption(drawing.thing.name, ground, size, place, random, paint),
        placed=(at(drawing, size, place, paint),),
        ground=ground,
        size=size,
        place=place,
    )


def at(drawing: Drawing, size: str, place: str, paint: str | None = None) -> Placed:
    """A drawing of a size at a place."""
    cells = SIZES[size]
    middle = (CELLS - cells) // 2
    across, down = (middle + SHIFT_CELLS * shift for shift in PLACE_SHIFTS[place])
    return Placed(drawing=drawing, cells=cells, corner=(across, down), paint=paint)


def pair(
    first: Drawing,
    second: Drawing,
    ground: str,
    random: Random,
    paints: tuple[str | None, str | None] = (None, None),
) -> Picture:
    """Two small things side by side or one above the other, each painted in its colour of `paints`; `place` tells
    where the first stands."""
    relation = random.choice(("left of", "right of", "left of", "right of", "above", "below"))
    return Picture(
        kind="painted-pair" if any(paints) else "pair",
        text=pair_caption(first.thing.name, second.thing.name, relation, ground, random, paints),
        placed=tuple(
            Placed(drawing=drawing, cells=SIZES["small"], corner=corner, paint=paint)
            for drawing, corner, paint in zip((first, second), PAIR_CORNERS[relation], paints, strict=True)
        ),
        ground=ground,
        size=None,
        place=relation,
    )


def several(drawing: Drawing, count: int, ground: str, random: Random, paint: str | None = None) -> Picture:
    """Two to four small copies of a thing that can be counted, all of one colour if `paint` is given."""
    return Picture(
        kind="painted-count" if paint else "count",
        text=count_caption(drawing.thing.name, count, ground, random, paint),
        placed=tuple(
            Placed(drawing=drawing, cells=SIZES["small"], corner=corner, paint=paint) for corner in COUNT_CORNERS[count]
        ),
        ground=ground,
        size=None,
        place=None,
    )
