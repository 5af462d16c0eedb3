"""What of a folder of drawings an evaluation looks at.

Shapes: N pictures, S side in pixels.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dalle_lean.errors import UserError
from inference.evaluation.captions import Line, drawing_path, read_lines, read_pixels, sample
from inference.evaluation.results import Sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """Held-out drawings and training pictures, chosen by a seed."""

    chosen: list[Line]
    """Held-out ones of known things, each with a caption of its own, which training never saw: to draw."""
    drawings: list[Path]
    """Their files."""
    lines: list[Line]
    """Held-out ones of all kinds."""
    pixels: Tensor
    """uint8 [N, 3, S, S] of them."""
    real: list[int]
    """Rows of them with captions that could be chosen: to compare with what is drawn."""
    floor: list[int]
    """Others such, whose reconstructions are compared."""
    train_lines: list[Line]
    train_pixels: Tensor
    """uint8 [N, 3, S, S] of them."""
    looked_through: list[Path]
    """Training pictures, among which the nearest to a drawn one is looked for."""


def choose_material(data: Path, sizes: Sizes, seed: int, side: int) -> Material:
    """From a folder that has train/ and heldout/, as `make data` writes it; ValueError where it is none such, or holds
    too little."""
    heldout, train = (read_lines(data / part) for part in ("heldout", "train"))
    seen = {line["text"] for line in train}
    # Of things that training never saw, and of captions that it did, nothing is drawn.
    fair = [line for line in heldout if line.get("held_out") != "concept" and line["text"] not in seen]
    chosen = sample(list({line["text"]: line for line in fair}.values()), sizes.captions, f"{seed}/captions")
    lines = sample(heldout, sizes.pictures, f"{seed}/pictures")
    files = {line["file_name"] for line in fair}
    rows = [row for row, line in enumerate(lines) if line["file_name"] in files]
    real, floor = rows[::2], rows[1::2]
    if len(chosen) < 2 or len(floor) < 2:
        raise UserError(
            f"{data / 'heldout'}: {len(chosen)} captions to draw and {len(rows)} pictures to compare with them that "
            "training never saw, of known things; at least 2 and 4 are needed"
        )
    train_lines = sample(train, sizes.train_pictures, f"{seed}/train")
    looked = sample(train, sizes.nearest_among, f"{seed}/nearest")
    return Material(
        chosen=chosen,
        drawings=[drawing_path(data / "heldout", line) for line in chosen],
        lines=lines,
        pixels=read_pixels(data / "heldout", lines, side),
        real=real,
        floor=floor,
        train_lines=train_lines,
        train_pixels=read_pixels(data / "train", train_lines, side),
        looked_through=[drawing_path(data / "train", line) for line in looked],
    )
