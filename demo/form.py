"""What somebody typed and chose, made a request; used by the page and by its endpoint."""

import secrets
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dalle_lean.errors import UserError
from demo.service.drawing_service import HIGHEST_GUIDANCE, LOWEST_GUIDANCE, Studio
from inference.generator import Request, Settings, check_prompt

LONGEST_PROMPT = 1000  # characters
MOST_IMAGES = 128
MOST_BEST = 16
HIGHEST_TEMPERATURE = 2
LARGEST_SEED = 2**31


@dataclass(frozen=True)
class Wish:
    """What the controls say, in their order on the page; not checked yet."""

    num_images: int
    best: int | None
    """None is 4, or all where fewer are drawn."""
    top_k: int
    top_p: float
    temperature: float
    guidance: float
    seed: int
    upload: bytes | None = None
    """A picture's file."""
    rows: int = 1
    """Of the upload, kept from its top."""


def read_request(studio: Studio, prompt: str, wish: Wish) -> Request:
    """ValueError, in a sentence, for an empty or endless prompt, a setting that cannot be, an upload that is no
    picture."""
    check_prompt(prompt)
    if len(prompt) > LONGEST_PROMPT:
        raise UserError(f"the prompt has {len(prompt)} characters; say it in {LONGEST_PROMPT}")
    num_images = wish.num_images
    if studio.generator.scorer is None and isinstance(num_images, int) and isinstance(wish.best, int):
        num_images = max(num_images, wish.best)
    settings = Settings(
        num_images=num_images,
        best=wish.best,
        top_k=wish.top_k,
        top_p=wish.top_p,
        temperature=wish.temperature,
        guidance=wish.guidance,
        seed=wish.seed,
    )
    if settings.num_images > MOST_IMAGES:
        raise UserError(f"num_images={settings.num_images}: this page draws at most {MOST_IMAGES}")
    if settings.num_best > MOST_BEST:
        raise UserError(f"best={settings.num_best}: this page shows at most {MOST_BEST}")
    codes = studio.generator.model.config.image_vocab_size
    for name, value, lowest, highest in (
        ("top_k", settings.top_k, 0, codes),
        ("temperature", settings.temperature, 0, HIGHEST_TEMPERATURE),
        ("guidance", settings.guidance, LOWEST_GUIDANCE, HIGHEST_GUIDANCE),
    ):
        if not lowest <= value <= highest:
            raise UserError(f"{name}={value}: it must lie in {lowest}..{highest} on this page")
    start = None if wish.upload is None else first_rows(studio, studio.read_upload(wish.upload), wish.rows)
    return Request(prompt, settings, start)


def first_rows(studio: Studio, codes: Tensor, rows: int) -> Tensor:
    """The codes [rows * side] of a picture's upper part; at least one row is left to draw."""
    side = studio.generator.model.config.image_side
    if not isinstance(rows, int) or not 1 <= rows < side:
        raise UserError(f"rows={rows}: of the picture's {side} rows, 1 to {side - 1} can be kept")
    return codes[: rows * side]


def default_rows(studio: Studio) -> int:
    """How much is kept by default: the upper half."""
    return int(studio.generator.model.config.image_side) // 2


def new_seed() -> int:
    """One that nobody can guess from the last."""
    return secrets.randbelow(LARGEST_SEED)


def default_settings(studio: Studio) -> dict[str, Any]:
    """The paper's, as far as this machine and this model go."""
    return {
        "num_images": studio.affordable(),
        "best": 4,
        "top_k": min(256, studio.generator.model.config.image_vocab_size),
        "top_p": 0.75,
        "temperature": 1.0,
        "guidance": studio.guidance,
    }
