"""What an evaluation measures, and how much of it."""

from dataclasses import dataclass
from typing import ClassVar

from dalle_lean.errors import UserError
from inference.evaluation.attribute_accuracy import AttributeAccuracy
from inference.evaluation.bits_per_code import BitsPerCode
from inference.evaluation.classification import ThingAccuracy
from inference.evaluation.clip_metrics import ClipMetrics
from inference.evaluation.distribution_metrics import Distances
from inference.evaluation.reconstruction import Reconstruction
from inference.evaluation.sampling_grid import Grid
from inference.evaluation.stats import Comparison, Proportion
from inference.request import Settings


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How much is measured; ValueError for too little."""

    best_of: tuple[int, ...] = (1, 4, 16)
    """Numbers of pictures from which the best is chosen; only 1 if nothing ranks pictures."""
    curve: tuple[int, ...] = (1, 4, 16, 64, 128)
    """The same for the curve."""
    curve_questions: int = 10
    """Questions per attribute for the curve; 0 leaves it out."""
    questions: int = 60
    """Questions per attribute."""
    captions: int = 100
    pictures: int = 512
    """Held-out pictures for the tokenizer, the bits and the distances."""
    train_pictures: int = 2048
    """Training pictures for the count models."""
    nearest_among: int = 100_000
    """Training pictures, at most, in which the nearest to a drawn one is searched."""
    grid_questions: int = 20
    """Questions per attribute for each sampling setting; 0 leaves the grid out."""

    SMALLEST: ClassVar[dict[str, int]] = {
        "questions": 1,
        "captions": 2,
        "pictures": 4,
        "train_pictures": 2,
        "nearest_among": 0,
        "curve_questions": 0,
        "grid_questions": 0,
    }

    def __post_init__(self) -> None:
        for name, counts in (("best_of", self.best_of), ("curve", self.curve)):
            if not counts or list(counts) != sorted({*counts}) or counts[0] < 1:
                raise UserError(f"{name}={counts}: must be numbers from 1 up, each larger than the one before")
        for name, smallest in self.SMALLEST.items():
            if getattr(self, name) < smallest:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {smallest}")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All results."""

    model_sha256: str | None
    config: EvalConfig
    settings: Settings
    ranker: str | None
    """The scorer that chose the best pictures; None if nothing did."""
    caption_dropout: float | None
    """Of the model's training; None is unknown."""
    reconstruction: Reconstruction
    kept_on_other_ground: float | None
    """See `reconstruction.kept_on_other_ground`."""
    bits: BitsPerCode
    attributes: dict[str, AttributeAccuracy]
    on_drawings: dict[str, Proportion]
    """The pixel judge's own accuracy for each attribute, on the real drawings."""
    curve: dict[str, AttributeAccuracy]
    """The first questions of each attribute, with more pictures; empty if nothing ranks them."""
    things: list[ThingAccuracy]
    """For each classifier and kind of prompts."""
    clip: ClipMetrics | None
    inception: Distances | None
    """Frechet inception distances."""
    grid: Grid
    comparisons: list[Comparison]
