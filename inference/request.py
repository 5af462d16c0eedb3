"""Requests to a generator, and its results.

I codes in a picture.
"""

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import check_ids
from inference.sampling.sampler import Sampling

DEFAULT_BEST = 4


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling):
    """What to draw for a prompt; the defaults are the paper's. ValueError outside the ranges."""

    num_images: int = 128
    best: int | None = None
    """How many to keep; None is 4, or all if fewer are drawn."""

    def __post_init__(self) -> None:
        for name in ("num_images", "best", "top_k", "seed"):
            optional = name == "best" and self.best is None
            if not (optional or isinstance(getattr(self, name), int)):
                raise UserError(f"{name}={getattr(self, name)}: it must be a whole number")
        for name in ("top_p", "temperature", "guidance"):
            if not isinstance(getattr(self, name), int | float):
                raise UserError(f"{name}={getattr(self, name)}: it must be a number")
        for name, value in (("num_images", self.num_images), ("best", self.num_best)):
            if value < 1:
                raise UserError(f"{name}={value}: it must be at least 1")
        if self.num_best > self.num_images:
            raise UserError(f"best={self.best} is more than num_images={self.num_images}; draw more or show fewer")
        super().__post_init__()

    @property
    def num_best(self) -> int:
        """How many pictures are kept."""
        return min(DEFAULT_BEST, self.num_images) if self.best is None else self.best

    def num_drawn(self, ranked: bool) -> int:
        """How many pictures are drawn: if nothing ranks them, only those that are kept."""
        return self.num_images if ranked else self.num_best


@dataclass(frozen=True)
class Request:
    """A prompt and what to draw for it."""

    prompt: str
    settings: Settings
    start: Tensor | None = None
    """The first codes [m] of every picture, m < I, as `Generator.read_picture` gives them; the rest is drawn."""
    first: int = 0
    """Index of the first picture drawn: several generators may each draw some of a prompt's pictures."""

    def check(self, config: DalleConfig) -> None:
        """ValueError for an empty prompt, and for a start that is not [m] codes of the model with m < I."""
        check_prompt(self.prompt)
        if self.start is None:
            return
        if self.start.dim() != 1 or len(self.start) >= config.image_len:
            shape = list(self.start.shape)
            raise UserError(f"start has shape {shape}; it must be [m] with m < {config.image_len} codes")
        check_ids("start", self.start[None], config.image_vocab_size)


def check_prompt(prompt: str) -> None:
    """ValueError for an empty or blank prompt."""
    if not prompt.strip():
        raise UserError("the prompt is empty; say in a few words what to draw")


@dataclass(frozen=True)
class Picture:
    """One picture of a prompt."""

    image: Image.Image
    score: float | None
    """The scorer's score; None if nothing ranked the pictures."""
    index: int
    """Number among the pictures drawn; with prompt, settings and seed it identifies the picture."""
    codes: Tensor
    """[I] int64, raster order."""


@dataclass(frozen=True)
class Progress:
    """Progress of drawing, in codes of all requests."""

    done: int
    total: int
    note: str = ""
    pictures: list[Picture] | None = None
    """The best pictures of a request, once all are drawn and ranked."""
    codes: Tensor | None = None
    """[n, m], the first m codes of a request's n pictures in the present batch."""
    request: int = 0
    """Index of the request to which `pictures` or `codes` belong."""
