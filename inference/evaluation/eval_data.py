"""How much an evaluation measures, and the drawings that it uses, chosen from a folder.

Shapes: N pictures, S side in pixels.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.fields import NonNegativeInt, PositiveInt, Range, check
from inference.evaluation.captions import Line, drawing_path, match_kinds, read_lines, read_pixels, sample


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How much is measured; ValueError for too little."""

    best_of: tuple[int, ...] = (1, 4, 16)
    """Numbers of pictures from which the best is chosen; only 1 if nothing ranks pictures."""
    curve: tuple[int, ...] = (1, 4, 16, 64, 128)  # the same for the curve
    curve_questions: NonNegativeInt = 10  # questions per attribute for the curve; 0 leaves it out
    questions: PositiveInt = 60  # questions per attribute
    captions: Annotated[int, Range(2)] = 100
    pictures: Annotated[int, Range(4)] = 512  # held-out pictures for the tokenizer, the bits and the distances
    train_pictures: Annotated[int, Range(2)] = 2048  # training pictures for the count models
    nearest_among: NonNegativeInt = 100_000  # at most, training pictures searched for the nearest to a drawn one
    grid_questions: NonNegativeInt = 20  # questions per attribute for each sampling setting; 0 leaves the grid out

    def __post_init__(self) -> None:
        check(self)
        for name, counts in (("best_of", self.best_of), ("curve", self.curve)):
            if not counts or list(counts) != sorted({*counts}) or counts[0] < 1:
                raise UserError(f"{name}={counts}: must be numbers from 1 up, each larger than the one before")


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalData:
    """Held-out drawings and training pictures, chosen by a seed."""

    to_draw: list[Line]  # held-out lines of known things, with distinct captions that training never saw
    drawings: list[Path]  # their files
    heldout: list[Line]  # held-out lines of all kinds
    heldout_pixels: Tensor  # uint8 [N, 3, S, S]
    real: list[int]  # rows of `heldout` that could be in `to_draw`: the set "real" of `Distances`
    floor: list[int]  # other such rows, whose reconstructions are the set "floor"
    train: list[Line]
    trained: list[int]  # rows of `train` of the kinds of `to_draw`, in the same proportions: the set "trained"
    train_pixels: Tensor  # uint8 [N, 3, S, S]
    neighbours: list[Path]  # training pictures in which the nearest to a drawn one is searched


def choose_data(folder: Path, config: EvalConfig, seed: int, side: int) -> EvalData:
    """Choose from a folder with train/ and heldout/, as `make data` writes it, and read pictures at `side` pixels;
    ValueError for any other folder, and for one with too few pictures."""
    heldout, train = (read_lines(folder / part) for part in ("heldout", "train"))
    trained_captions = {line["text"] for line in train}
    # Things that training never saw are unfair to ask for, and captions that it saw are too easy.
    fair = [line for line in heldout if line.get("held_out") != "concept" and line["text"] not in trained_captions]
    to_draw = sample(list({line["text"]: line for line in fair}.values()), config.captions, f"{seed}/captions")
    lines = sample(heldout, config.pictures, f"{seed}/pictures")
    files = {line["file_name"] for line in fair}
    rows = [row for row, line in enumerate(lines) if line["file_name"] in files]
    real, floor = rows[::2], rows[1::2]
    if len(to_draw) < 2 or len(floor) < 2:
        raise UserError(
            f"{folder / 'heldout'}: {len(to_draw)} captions to draw and {len(rows)} pictures to compare with them that "
            "training never saw, of known things; at least 2 and 4 are needed"
        )

    def paths(part: str, lines: list[Line]) -> list[Path]:
        return [drawing_path(folder / part, line) for line in lines]

    train_lines = sample(train, config.train_pictures, f"{seed}/train")
    trained = match_kinds(train_lines, to_draw)
    if len(trained) < 2:
        raise UserError(
            f"{folder / 'train'}: {len(trained)} of {len(train_lines)} pictures are left with the kinds of captions "
            "to draw, in the same proportions; at least 2 are needed"
        )
    return EvalData(
        to_draw=to_draw,
        drawings=paths("heldout", to_draw),
        heldout=lines,
        heldout_pixels=read_pixels(paths("heldout", lines), side),
        real=real,
        floor=floor,
        train=train_lines,
        trained=trained,
        train_pixels=read_pixels(paths("train", train_lines), side),
        neighbours=paths("train", sample(train, config.nearest_among, f"{seed}/nearest")),
    )
