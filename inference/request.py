"""Requests to a generator, and its results. Nothing here imports torch until a request is checked.

I codes in a picture.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from dalle_lean.errors import UserError, check_guidance
from dalle_lean.fields import PositiveInt, Range, check

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from dalle_lean.model.config import DalleConfig

DEFAULT_BEST = 4
HIGHEST_TEMPERATURE = 1e6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to draw for a prompt, and how; the defaults are the paper's. ValueError outside the ranges."""

    top_k: int = 256  # draw only from the k most likely codes; 0 is off
    top_p: float = 0.75  # draw only from the most likely codes that make up this probability, 0..1; 1 is off
    temperature: float = 1.0  # 0 takes the most likely code each time
    seed: Annotated[int, Range(0, 2**64 - 1)] = 0
    guidance: float = 1.0
    """Scale of classifier-free guidance, for models trained with caption dropout; 1 is off. See `filtering.guide`."""
    num_images: PositiveInt = 128
    best: PositiveInt | None = None  # how many to keep; None is 4, or all if fewer are drawn

    def __post_init__(self) -> None:
        check(self)
        if self.num_best > self.num_images:
            raise UserError(
                f"cannot keep the best {self.best} of {self.num_images} candidates; draw more or keep fewer"
            )
        if not 0 <= self.top_k < 2**31:
            raise UserError(f"top_k={self.top_k}: it must be 0 (off) or the number of codes to keep")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: it must lie in 0..1 (1 is off)")
        if not 0 <= self.temperature <= HIGHEST_TEMPERATURE:
            allowed = f"0, which takes the likeliest code each time, to {HIGHEST_TEMPERATURE:,.0f}"
            raise UserError(f"temperature={self.temperature}: it must be from {allowed}")
        check_guidance(self.guidance)

    @property
    def num_best(self) -> int:
        return min(DEFAULT_BEST, self.num_images) if self.best is None else self.best

    def num_drawn(self, ranked: bool) -> int:
        """How many pictures are drawn: if nothing ranks them, only those that are kept."""
        return self.num_images if ranked else self.num_best


@dataclass(frozen=True)
class Request:
    prompt: str
    settings: Settings
    start: "Tensor | None" = None
    """The first codes [m] of every picture, m < I, as `Generator.read_picture` gives them; the rest is drawn."""
    first: int = 0  # index of the first picture drawn: several generators may each draw some of a prompt's pictures

    def check(self, config: "DalleConfig") -> None:
        """ValueError for an empty prompt, and for a start that is not [m] codes of the model with m < I."""
        check_prompt(self.prompt)
        if self.start is None:
            return
        if self.start.dim() != 1 or len(self.start) >= config.image_len:
            shape = list(self.start.shape)
            raise UserError(f"start has shape {shape}; it must be [m] with m < {config.image_len} codes")
        from dalle_lean.model.dalle import check_ids

        check_ids("start", self.start[None], config.image_vocab_size)


def tidy(prompt: str) -> str:
    """The prompt with one space between words: doubled spaces and line ends would be tokens that no caption has."""
    return " ".join(prompt.split())


def check_prompt(prompt: str) -> None:
    """ValueError for an empty or blank prompt."""
    if not prompt.strip():
        raise UserError("the prompt is empty; say in a few words what to draw")


@dataclass(frozen=True)
class Picture:
    image: "Image.Image"
    score: float | None  # the scorer's score; None if nothing ranked the pictures
    index: int  # number among the pictures drawn; with prompt, settings and seed it identifies the picture
    codes: "Tensor"  # [I] int64, raster order


@dataclass(frozen=True)
class Progress:
    """Progress of drawing, in codes of all requests."""

    done: int
    total: int
    note: str = ""
    pictures: list[Picture] | None = None  # the best pictures of a request, once all are drawn and ranked
    codes: "Tensor | None" = None  # [n, m], the first m codes of a request's n pictures in the present batch
    request: int = 0  # index of the request to which `pictures` or `codes` belong
