"""A classifier of the thing in a picture: a small residual network (He et al. 2015, arXiv 1512.03385) over the thing
cut out of its ground. A classifier folder holds config.json and model.safetensors.

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
from dalle_lean.io.files import sha256_file, write_json
from dalle_lean.io.folder_config import read_folder_config
from dalle_lean.io.safetensors_io import load_strictly, read_weights, refuse_infinite, save_weights
from dalle_lean.require import require

FORMAT = "dalle_lean_things/1"
WEIGHTS = "model.safetensors"
BLOCKS = (1, 1, 1, 1)
READ_SIDE = 128  # pixels to which a picture is resized before its thing is cut out
MAX_THINGS = 100_000
SIDES = range(32, 513)
BATCH = 64


class ThingClassifier:
    """Scores the things that it knows; the model is in eval mode except in training.

    Args:
        things: their names, without duplicates.
        picture_side: S, the size at which a thing is cut out.

    Raises ValueError for too few, too many or equal names, or a side out of range.
    """

    def __init__(self, things: Sequence[str], picture_side: int = 64, device: torch.device | str = "cpu"):
        if not 2 <= len(things) <= MAX_THINGS or len({*things}) != len(things):
            raise UserError(f"things: {len(things)} names: must be 2..{MAX_THINGS} different ones")
        if picture_side not in SIDES:
            raise UserError(f"picture_side={picture_side}: must be in {SIDES[0]}..{SIDES[-1]}")
        self.things = tuple(things)
        self.sha256: str | None = None  # of the weights; None if they were not read from a folder
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
        try:
            classifier = cls(config["things"], config["picture_side"], device)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        weights = read_weights(folder / WEIGHTS, classifier.model.state_dict())
        if sha256_file(folder / WEIGHTS) != config["sha256"]:
            raise UserError(f"{folder}: {WEIGHTS} is not the file this classifier was saved with; get a complete copy")
        load_strictly(classifier.model, weights, f"{folder / WEIGHTS}")
        refuse_infinite(classifier.model.state_dict(), f"{folder / WEIGHTS}")
        classifier.sha256 = config["sha256"]
        return classifier

    def save(self, folder: str | Path) -> None:
        """Write a classifier folder, config.json last."""
        folder = Path(folder)
        save_weights(self.model.state_dict(), folder / WEIGHTS)
        content = {"format": FORMAT, "things": self.things, "picture_side": self.picture_side}
        write_json(folder / "config.json", content | {"sha256": sha256_file(folder / WEIGHTS)})

    def rows(self, things: Sequence[str]) -> Tensor:
        """The columns [N] of known things in the scores."""
        return torch.tensor([self.row_of[thing] for thing in things])

    def scores(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Logits [N, T], float32, of whole pictures."""
        things = [picture_of_thing(picture, self.picture_side) for picture in pictures]
        return self.scores_of_pixels(torch.stack(things))

    @torch.no_grad()
    def scores_of_pixels(self, pixels: Tensor) -> Tensor:
        """Logits [N, T], float32, of cut-out things, uint8 [N, 3, S, S]."""
        return torch.cat([self.model(self.prepare(batch)).float() for batch in pixels.split(BATCH)])

    def prepare(self, pixels: Tensor) -> Tensor:
        """Pixels [N, 3, S, S] in 0..255 -> the model's input, float32 in -1..1."""
        centred = pixels.to(self.device, torch.float32) / 127.5 - 1
        return centred.contiguous(memory_format=torch.channels_last)


def picture_of_thing(picture: Image.Image, side: int) -> Tensor:
    """The thing of a picture, cut out: uint8 [3, side, side]."""
    if picture.size != (READ_SIDE, READ_SIDE):
        picture = picture.convert("RGB").resize((READ_SIDE, READ_SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(cut_out(picture, side))).permute(2, 0, 1)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_folder_config(folder, FORMAT)
    if wrong := {"format", "things", "picture_side", "sha256"} ^ set(config):
        raise UserError(f"{path}: unknown or missing fields {sorted(wrong)}")
    things, side = config["things"], config["picture_side"]
    if not isinstance(things, list) or not all(isinstance(thing, str) for thing in things):
        raise UserError(f"{path}: things must be a list of names")
    if not is_whole(side):
        raise UserError(f"{path}: picture_side={side!r}: must be a number of pixels")
    return config
