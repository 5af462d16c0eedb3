"""What an evaluation measures, and how much of it."""

from dataclasses import asdict, dataclass
from typing import Any

from dalle_lean.errors import UserError
from inference.evaluation.attribute_accuracy import Attributes
from inference.evaluation.bits_per_code import Bits
from inference.evaluation.classification import Recognised
from inference.evaluation.clip_metrics import Judged
from inference.evaluation.distribution_metrics import Distances
from inference.evaluation.proportions import Share, share
from inference.evaluation.questions import subjects
from inference.evaluation.reconstruction import Reconstruction
from inference.evaluation.sampling_grid import Way
from inference.evaluation.significance import Claim
from inference.generator import Settings


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    best_of: tuple[int, ...] = (1, 4, 16)
    """The shares are told of the best of the last. Only 1 where nothing ranks pictures."""
    curve: tuple[int, ...] = (1, 4, 16, 64, 128)
    """The best of so many is compared for the first questions of each attribute."""
    curve_questions: int = 10
    """0 leaves the curve out."""
    questions: int = 60
    """Of each attribute."""
    captions: int = 100
    pictures: int = 512
    """Held-out ones, for the tokenizer, the bits and the distances."""
    train_pictures: int = 2048
    """From which the count models learn."""
    nearest_among: int = 100_000
    """Training pictures, at most, among which the nearest to a drawn one is looked for."""
    grid_questions: int = 20
    """Of each attribute, for each way of drawing; 0 leaves the grid out."""

    def __post_init__(self) -> None:
        for name, counts in (("best_of", self.best_of), ("curve", self.curve)):
            if not counts or list(counts) != sorted({*counts}) or counts[0] < 1:
                raise UserError(f"{name}={counts}: numbers of pictures from 1 up, each larger than the one before")
        smallest = {
            "questions": 1,
            "captions": 2,
            "pictures": 4,
            "train_pictures": 2,
            "nearest_among": 0,
            "curve_questions": 0,
            "grid_questions": 0,
        }
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything measured."""

    model_sha256: str | None
    sizes: Sizes
    settings: Settings
    ranker: str | None
    """What chose the best pictures; None where nothing did."""
    caption_dropout: float | None
    """Of the model's training; None is not known."""
    reconstruction: Reconstruction
    bits: Bits
    attributes: dict[str, Attributes]
    curve: dict[str, dict[int, Share]]
    """Of each attribute, by how many pictures the best was chosen from."""
    recognised: Recognised | None
    """Which thing is seen, where a classifier was given."""
    judged: Judged | None
    inception: Distances | None
    """Frechet inception distances, where a file of weights was given."""
    grid: dict[Way, dict[str, list[bool]]]
    """Of each way of drawing and attribute, whether each question is right."""
    claims: list[Claim]

    def to_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "model_sha256": self.model_sha256,
            "best_of": self.settings.num_images,
            "settings": asdict(self.settings),
            "sizes": asdict(self.sizes),
            "ranker": self.ranker,
            "caption_dropout": self.caption_dropout,
            "tokenizer": self.reconstruction.to_dict(),
            "bits_per_code": self.bits.to_dict(),
            "attributes": {
                name: {
                    "best_of": {str(count): found.to_dict() for count, found in attribute.by_best_of.items()},
                    "on_drawings": attribute.on_drawings.to_dict(),
                    "commonest_answer": attribute.commonest.to_dict(),
                    "different_subjects": subjects(attribute.questions),
                }
                for name, attribute in self.attributes.items()
            },
            "curve": {
                name: {str(count): found.to_dict() for count, found in by_count.items()}
                for name, by_count in self.curve.items()
            },
            "right_thing_first": self.recognised and self.recognised.to_dict(),
            "judged": self.judged and self.judged.to_dict(),
            "frechet_inception_distance": self.inception and self.inception.to_dict(),
            "claims": [claim.to_dict() for claim in self.claims],
            "grid": [
                {**way._asdict(), **{name: share(hits).to_dict() for name, hits in found.items()}}
                for way, found in self.grid.items()
            ],
        }
