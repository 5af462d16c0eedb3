"""A visitor's prompt and settings as a request, for the page and its endpoint; the ranges of the number fields."""

import re
import secrets
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig
from demo.service.drawing_service import HIGHEST_GUIDANCE, LOWEST_GUIDANCE, DrawingService
from inference.request import Request, Settings, check_prompt

LONGEST_PROMPT = 1000  # characters
MOST_IMAGES = 128
MOST_BEST = 16
HIGHEST_TEMPERATURE = 2
LARGEST_SEED = 2**31
LARGEST_EXACT_SEED = 2**53 - 1  # the seed box is a number in JavaScript


@dataclass(frozen=True)
class Field:
    """A number in lowest..highest; a whole one if `step` is."""

    label: str
    lowest: float
    highest: float
    step: float = 1

    def read(self, value: Any) -> Any:
        """The number in the field; UserError, with its label, for anything else."""
        whole = self.step % 1 == 0
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self.lowest <= value <= self.highest or (whole and value % 1):
            kind = "whole number" if whole else "number"
            raise UserError(f"“{self.label}” must be a {kind} from {self.lowest} to {self.highest}")
        return int(value) if whole else value


def prompt_fields(config: DalleConfig, ranked: bool) -> dict[str, Field]:
    """The number fields of the prompt page, by the names of `read_request`'s arguments; `ranked`: by a scorer."""
    return {
        "num_images": Field("Candidates", 1, MOST_IMAGES),
        "best": Field("Show the best" if ranked else "Pictures", 1, MOST_BEST),
        "top_k": Field("Top-k", 0, config.image_vocab_size),
        "top_p": Field("Top-p", 0, 1, 0.01),
        "temperature": Field("Temperature", 0, HIGHEST_TEMPERATURE, 0.05),
        "guidance": Field("Guidance", LOWEST_GUIDANCE, HIGHEST_GUIDANCE, 0.25),
        "seed": Field("Seed", 0, LARGEST_EXACT_SEED),
        "rows": Field("Rows kept", 1, config.image_side - 1),
    }


def read_request(
    service: DrawingService, prompt: str, upload: bytes | None = None, rows: int = 1, **chosen: Any
) -> Request:
    """The request; UserError for an empty or overlong prompt, a setting out of range, or an upload that is not a
    picture.

    Args:
        upload: a picture's file, of which `rows` rows of codes are kept from the top.
        chosen: fields of Settings, not yet checked.
    """
    check_prompt(prompt)
    num_images, best = chosen["num_images"], chosen["best"]
    if service.generator.scorer is None and isinstance(num_images, int) and isinstance(best, int):
        chosen["num_images"] = max(num_images, best)
    settings = Settings(**chosen)
    check_limits(prompt, settings, service.generator.model.config)
    start = None if upload is None else first_rows(service, service.read_upload(upload), rows)
    return Request(prompt, settings, start)


def cut_prompt(prompt: str) -> str:
    """A prompt, cut to LONGEST_PROMPT characters at the end of a word if possible."""
    if len(prompt) <= LONGEST_PROMPT:
        return prompt
    head = prompt[: LONGEST_PROMPT + 1]
    whole_words = re.sub(r"\s+\S*\Z", "", head)
    return (whole_words if whole_words.strip() else head)[:LONGEST_PROMPT]


def check_limits(prompt: str, settings: Settings, config: DalleConfig) -> None:
    """UserError if a request exceeds the limits of the page."""
    if len(prompt) > LONGEST_PROMPT:
        raise UserError(f"the prompt has {len(prompt)} characters; shorten it to {LONGEST_PROMPT}")
    if settings.num_images > MOST_IMAGES:
        raise UserError(f"{settings.num_images} candidates: this page draws at most {MOST_IMAGES}")
    if settings.num_best > MOST_BEST:
        raise UserError(f"the best {settings.num_best}: this page shows at most {MOST_BEST}")
    fields = prompt_fields(config, ranked=True)
    for name in ("top_k", "temperature", "guidance"):
        field, value = fields[name], getattr(settings, name)
        if not field.lowest <= value <= field.highest:
            raise UserError(f"{name}={value}: it must lie in {field.lowest}..{field.highest} on this page")


def first_rows(service: DrawingService, codes: Tensor, rows: int) -> Tensor:
    """The codes [rows * side] of a picture's upper rows; UserError unless at least one row is left to draw."""
    side = service.generator.model.config.image_side
    if not isinstance(rows, int) or not 1 <= rows < side:
        raise UserError(f"rows={rows}: of the picture's {side} rows, 1 to {side - 1} can be kept")
    return codes[: rows * side]


def new_seed() -> int:
    """A random seed that cannot be guessed from the previous one."""
    return secrets.randbelow(LARGEST_SEED)


def default_settings(service: DrawingService) -> dict[str, Any]:
    """The paper's settings within the limits of this machine and this model, and half of the rows of an upload."""
    paper, config = Settings(), service.generator.model.config
    return {
        "num_images": service.affordable(),
        "best": paper.num_best,
        "top_k": min(paper.top_k, config.image_vocab_size),
        "top_p": paper.top_p,
        "temperature": paper.temperature,
        "guidance": service.guidance,
        "rows": config.image_side // 2,
    }
