"""The number fields of the pages: their labels and ranges, and the check of what a visitor enters."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from dalle_lean.errors import UserError
from demo.form import HIGHEST_TEMPERATURE, LARGEST_EXACT_SEED, MOST_BEST, MOST_IMAGES
from demo.service.drawing_service import HIGHEST_GUIDANCE, LOWEST_GUIDANCE, DrawingService

# Gradio's own check prints a traceback and says nothing on the page. `Field.read` checks instead.
gr.Number.raise_if_out_of_bounds = staticmethod(lambda num, minimum, maximum: None)  # type: ignore[method-assign]


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


def prompt_fields(service: DrawingService) -> dict[str, Field]:
    """The number fields of the prompt page, by the names of `read_request`'s arguments."""
    config, ranked = service.generator.model.config, service.generator.scorer is not None
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
