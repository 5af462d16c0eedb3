"""A folder of captioned drawings, as `make data` writes it. It may come from anyone: no file outside it is opened.

Shapes: N pictures, S side in pixels.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.files import UnusablePicture, read_square
from dalle_lean.images.image_folder import LISTING, Line, Unusable, listed_file, parse_line
from dalle_lean.io.files import read_text

T = TypeVar("T")

MOST_LISTING_BYTES = 2**30
FACTS = ("ground", "paint", "size", "place", "held_out")
"""Fields of a line with a kind: text, or null if the caption does not mention it."""
KIND_FACTS: dict[str, dict[str, type]] = {"painted-pair": {"paints": list}, "painted-count": {"count": int}}
"""More fields of the lines of a kind."""


def read_lines(folder: Path) -> list[Line]:
    """The lines of an ImageFolder's metadata.jsonl; ValueError if it is missing or malformed."""
    listing = folder / LISTING
    if not listing.is_file():
        raise UserError(
            f"{folder} has no {LISTING}; `make data` draws such a folder (it needs npm), with train/ and heldout/"
        )
    lines: list[Line] = []
    for number, text in enumerate(filter(str.strip, read_text(listing, MOST_LISTING_BYTES).split("\n")), start=1):
        try:
            line = parse_line(text)
            check_facts(line)
        except Unusable as error:
            raise UserError(f"{listing}, line {number}: {error}") from None
        lines.append(line)
    if not lines:
        raise UserError(f"{listing} is empty: every line must have file_name and text")
    return lines


def check_facts(line: Line) -> None:
    """Unusable unless a line has a caption, and everything that the evaluation reads if it has facts."""
    text = line.get("text")
    if not (isinstance(text, str) and text.strip()):
        raise Unusable("no text")
    if "kind" not in line and "held_out" not in line:
        return  # a caption without facts
    things = line.get("things")
    if not (isinstance(things, list) and things and all(isinstance(thing, str) and thing.strip() for thing in things)):
        raise Unusable("things must be a list of names")
    wrong = [name for name in FACTS if name not in line or not isinstance(line[name], str | None)]
    if wrong or not isinstance(line.get("kind"), str):
        raise Unusable(f"{(*wrong, 'kind')[0]} must be text, or null if the caption does not tell it")
    for name, kind in KIND_FACTS.get(line["kind"], {}).items():
        if not isinstance(line.get(name), kind):
            raise Unusable(f"{name} must be {'a list' if kind is list else 'a whole number'} in a line of this kind")


def drawing_path(folder: Path, line: Line) -> Path:
    """The file of a line's picture; ValueError if its name leads out of the folder."""
    try:
        return listed_file(folder, line["file_name"])
    except Unusable as error:
        raise UserError(f"{folder / LISTING}, {line['file_name']!r}: {error}") from None


def open_pixels(path: Path, side: int | None = None) -> NDArray[np.uint8]:
    """The centre square of a picture, RGB [S, S, 3], at `side` pixels or its own size; ValueError if it is broken."""
    try:
        return read_square(path, side)
    except UnusablePicture as error:
        raise UserError(f"{path}: {error.sentence}") from None


def open_drawing(path: Path) -> Image.Image:
    """The centre square of a picture at its own size, as a PIL image; ValueError if it is broken."""
    return Image.fromarray(open_pixels(path))


def read_pixels(paths: Sequence[Path], side: int) -> Tensor:
    """uint8 [N, 3, S, S] of the pictures in these files; ValueError for one that is missing or broken."""
    pictures = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    for row, path in enumerate(paths):
        pictures[row] = torch.tensor(open_pixels(path, side)).permute(2, 0, 1)
    return pictures


def sample(items: Sequence[T], count: int, seed: str) -> list[T]:
    """At most `count` of the items in random order; a smaller count gives the first of these."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order[:count]


def match_kinds(lines: Sequence[Line], like: Sequence[Line]) -> list[int]:
    """As many rows of `lines` as possible with the kinds in the proportions of `like`. Kinds that are not in both are
    left out; without a common kind, all rows are taken."""
    rows = defaultdict(list)
    for row, line in enumerate(lines):
        rows[line.get("kind")].append(row)
    wanted = Counter(kind for line in like if (kind := line.get("kind")) in rows)
    if not wanted:
        return list(range(len(lines)))
    scale = min(Fraction(len(rows[kind]), count) for kind, count in wanted.items())
    return sorted(row for kind, count in wanted.items() for row in rows[kind][: int(scale * count)])
