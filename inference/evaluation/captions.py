"""A folder of captioned drawings as `make data` writes it. It may come from anyone: nothing outside it is opened."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.files import UnusablePicture, lies_in, open_picture, quiet_pillow, read_picture, square_pixels
from dalle_lean.io.files import read_text

Line = dict[str, Any]
T = TypeVar("T")

MOST_LISTING_BYTES = 2**30
TOLD = ("ground", "paint", "size", "place", "held_out")
"""Facts that a line with a kind tells: text, or null where its caption does not."""


def read_lines(folder: Path) -> list[Line]:
    """The lines of an ImageFolder's metadata.jsonl; ValueError where there is none or it is broken."""
    listing = folder / "metadata.jsonl"
    if not listing.is_file():
        raise UserError(
            f"{folder} has no metadata.jsonl; `make data` draws such a folder (it needs npm), with train/ and heldout/"
        )
    try:
        lines = [json.loads(line) for line in read_text(listing, MOST_LISTING_BYTES).splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{listing}: {error}") from None
    if not lines:
        raise UserError(f"{listing} is empty: every line must have file_name and text")
    for number, line in enumerate(lines, start=1):
        if problem := problem_of(line):
            raise UserError(f"{listing}, line {number}: {problem}")
    return lines


def problem_of(line: Any) -> str | None:
    """What is wrong with a line of a listing, if anything."""
    if not isinstance(line, dict) or not all(isinstance(line.get(name), str) for name in ("file_name", "text")):
        return "it must have file_name and text"
    if "kind" not in line and "held_out" not in line:
        return None  # a caption and no facts
    things = line.get("things")
    if not (isinstance(things, list) and things and all(isinstance(thing, str) and thing.strip() for thing in things)):
        return "things must be a list of names"
    wrong = [name for name in TOLD if name not in line or not isinstance(line[name], str | None)]
    if wrong or not isinstance(line.get("kind"), str):
        return f"{(*wrong, 'kind')[0]} must be text, or null where the caption does not tell it"
    return None


def drawing_path(folder: Path, line: Mapping[str, Any]) -> Path:
    """Where a line's picture lies; ValueError where its name leads out of the folder."""
    path: Path = folder / line["file_name"]
    if not lies_in(folder, path):
        raise UserError(f"{folder / 'metadata.jsonl'}: file_name {line['file_name']!r} leads out of the folder")
    return path


def open_pixels(path: Path, side: int | None = None) -> NDArray[np.uint8]:
    """The centre square of a picture, [S, S, 3] in RGB, at `side` pixels or its own; ValueError where it has none."""
    content, problem = read_picture(path)
    if problem is None:
        try:
            with quiet_pillow():
                image = open_picture(content)
                return square_pixels(image, min(image.size) if side is None else side)
        except UnusablePicture as error:
            problem = f"{error.reason}, {error}"
    raise UserError(f"{path}: {problem.replace('_', ' ')}")


def open_drawing(path: Path) -> Image.Image:
    """The same as a picture."""
    return Image.fromarray(open_pixels(path))


def read_pixels(folder: Path, lines: Sequence[Mapping[str, Any]], side: int) -> Tensor:
    """uint8 [N, 3, S, S] of the pictures of these lines; ValueError for one that is missing or broken."""
    pictures = torch.empty(len(lines), 3, side, side, dtype=torch.uint8)
    for row, line in enumerate(lines):
        pictures[row] = torch.tensor(open_pixels(drawing_path(folder, line), side)).permute(2, 0, 1)
    return pictures


def sample(items: Sequence[T], count: int, seed: str) -> list[T]:
    """At most `count` of the items in random order, so that its first few are a sample too."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order[:count]


def of_the_same_kinds(lines: Sequence[Line], like: Sequence[Line]) -> list[int]:
    """Rows of `lines`, as many as possible, among which each kind has the share that it has in `like`; kinds that one
    of them lacks are left out, and where they have none in common all rows are taken."""
    rows = defaultdict(list)
    for row, line in enumerate(lines):
        rows[line.get("kind")].append(row)
    wanted = Counter(kind for line in like if (kind := line.get("kind")) in rows)
    if not wanted:
        return list(range(len(lines)))
    scale = min(len(rows[kind]) / count for kind, count in wanted.items())
    return sorted(row for kind, count in wanted.items() for row in rows[kind][: int(scale * count)])
