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
    """Numbers of pictures to choose the best from; only 1 where nothing ranks pictures."""
    curve: tuple[int, ...] = (1, 4, 16, 64, 128)
    """The same for the first questions of each attribute."""
    curve_questions: int = 10
    """Of each attribute; 0 leaves the curve out."""
    questions: int = 60
    """Of each attribute."""
    captions: int = 100
    pictures: int = 512
    """Held-out ones, for the tokenizer, the bits and the distances."""
    train_pictures: int = 2048
    """From which the count models learn."""
    nearest_among: int = 100_000
    """Training pictures, at most, among which the nearest to a drawn one is searched."""
    grid_questions: int = 20
    """Of each attribute, for each sampling setting; 0 leaves the grid out."""

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
                raise UserError(f"{name}={counts}: numbers of pictures from 1 up, each larger than the one before")
        for name, smallest in self.SMALLEST.items():
            if getattr(self, name) < smallest:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {smallest}")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything measured."""

    model_sha256: str | None
    config: EvalConfig
    settings: Settings
    ranker: str | None
    """What chose the best pictures; None where nothing did."""
    caption_dropout: float | None
    """Of the model's training; None is unknown."""
    reconstruction: Reconstruction
    kept_on_other_ground: float | None
    """See `reconstruction.kept_on_other_ground`."""
    bits: BitsPerCode
    attributes: dict[str, AttributeAccuracy]
    on_drawings: dict[str, Proportion]
    """Of the real drawings, for each attribute: what the pixel judge itself can do."""
    curve: dict[str, AttributeAccuracy]
    """The first questions of each attribute, with more pictures; empty where nothing ranks them."""
    things: list[ThingAccuracy]
    """By each classifier, for each kind of prompts."""
    clip: ClipMetrics | None
    inception: Distances | None
    """Frechet inception distances."""
    grid: Grid
    comparisons: list[Comparison]
