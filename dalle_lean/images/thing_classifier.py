"""Which of the things it knows a picture shows: a small residual network (He et al. 2015, arXiv 1512.03385) that looks
at what stands on the ground, cut out of the picture. A classifier folder holds config.json and model.safetensors.

Shapes: N pictures, S side in pixels, T things.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError, is_whole
from dalle_lean.images.ground import cut_out
from dalle_lean.io.files import read_format, sha256_file, write_json
from dalle_lean.io.safetensors_io import load_strictly, read_weights, refuse_infinite, save_weights
from dalle_lean.require import require

FORMAT = "dalle_lean_things/1"
WEIGHTS = "model.safetensors"
BLOCKS = (1, 1, 1, 1)
READ_SIDE = 128
"""To which a picture is brought before its thing is cut out."""
MOST_THINGS = 100_000
SIDES = range(32, 513)


class ThingClassifier:
    """Scores of the things that it knows; the model is in eval mode, except while it learns.

    Args:
        things: their names, each once.
        picture_side: S; a thing is cut out at this size.

    Raises ValueError where one of them does not fit.
    """

    def __init__(self, things: Sequence[str], picture_side: int = 64, device: torch.device | str = "cpu"):
        if not 2 <= len(things) <= MOST_THINGS or len({*things}) != len(things):
            raise UserError(f"things: {len(things)} names: must be 2..{MOST_THINGS} different ones")
        if picture_side not in SIDES:
            raise UserError(f"picture_side={picture_side}: must be in {SIDES[0]}..{SIDES[-1]}")
        self.things = tuple(things)
        self.sha256: str | None = None
        """Of the weights, where they were read from a folder."""
        self.row_of = {thing: row for row, thing in enumerate(self.things)}
        self.picture_side = picture_side
        self.device = torch.device(device)
        resnet = require("torchvision.models.resnet", extra="evaluation")
        self.model: torch.nn.Module = resnet.ResNet(resnet.BasicBlock, list(BLOCKS), num_classes=len(things))
        self.model.to(self.device, memory_format=torch.channels_last).eval()

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> Self:
        """Read a classifier folder; ValueError names what is missing, altered or wrong."""
        folder = Path(folder)
        config = read_config(folder)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder}: {WEIGHTS} is missing")
        try:
            classifier = cls(config["things"], config["picture_side"], device)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        weights = read_weights(folder / WEIGHTS, classifier.model.state_dict())
        if sha256_file(folder / WEIGHTS) != config["sha256"]:
            raise UserError(f"{folder}: {WEIGHTS} is not the file this classifier was saved with; get a complete copy")
        load_strictly(classifier.model, weights, f"{folder / WEIGHTS}")
        refuse_infinite(classifier.model, f"{folder / WEIGHTS}")
        classifier.sha256 = config["sha256"]
        return classifier

    def save(self, folder: str | Path) -> None:
        """Write a classifier folder; config.json comes last."""
        folder = Path(folder)
        save_weights(self.model.state_dict(), folder / WEIGHTS)
        content = {
            "format": FORMAT,
            "things": self.things,
            "picture_side": self.picture_side,
            "sha256": sha256_file(folder / WEIGHTS),
        }
        write_json(folder / "config.json", content)

    def rows(self, things: Sequence[str]) -> Tensor:
        """Where things that it knows stand in the scores: [N]."""
        return torch.tensor([self.row_of[thing] for thing in things])

    def scores(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Of pictures as they are: [N, T] float32, the larger the likelier."""
        return self.scores_of_pixels(
            torch.stack([picture_of_thing(picture, self.picture_side) for picture in pictures])
        )

    @torch.no_grad()
    def scores_of_pixels(self, pixels: Tensor, batch_size: int = 64) -> Tensor:
        """Of things cut out, uint8 [N, 3, S, S]: the same."""
        return torch.cat([self.model(self.prepare(batch)).float() for batch in pixels.split(batch_size)])

    def prepare(self, pixels: Tensor) -> Tensor:
        """[N, 3, S, S], 0 black and 255 white -> what the model takes."""
        centred = pixels.to(self.device, torch.float32) / 127.5 - 1
        return centred.contiguous(memory_format=torch.channels_last)


def picture_of_thing(picture: Image.Image, side: int) -> Tensor:
    """What stands on the ground of a picture, cut out: uint8 [3, side, side]."""
    if picture.size != (READ_SIDE, READ_SIDE):
        picture = picture.convert("RGB").resize((READ_SIDE, READ_SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(cut_out(picture, side))).permute(2, 0, 1)


def read_config(folder: Path) -> dict[str, Any]:
    """The checked content of a classifier folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not the folder of a classifier: it has no config.json; train-things writes OUT/classifier"
        )
    config = read_format(path, FORMAT)
    if wrong := {"format", "things", "picture_side", "sha256"} ^ set(config):
        raise UserError(f"{path}: unknown or missing fields {sorted(wrong)}")
    things, side = config["things"], config["picture_side"]
    if not isinstance(things, list) or not all(isinstance(thing, str) for thing in things):
        raise UserError(f"{path}: things must be a list of names")
    if not is_whole(side, smallest=0):
        raise UserError(f"{path}: picture_side={side!r}: must be a number of pixels")
    return config
