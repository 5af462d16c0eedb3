"""Measures by a CLIP, preferably one that neither ranked the pictures nor was trained on the same drawings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer, right_caption_first
from dalle_lean.errors import UserError
from dalle_lean.progress import OnBatch
from inference.evaluation.captions import open_drawing
from inference.evaluation.distribution_metrics import Distances, kernel_distance, nearest
from inference.evaluation.prompt_sampling import Samples
from inference.evaluation.stats import Proportion
from inference.scorer import Scorer, make_scorer

CANDIDATES = 50
BATCH = 64


def make_judge(spec: str, device: torch.device) -> ClipScorer:
    """The CLIP that a user names as for `make_scorer`; ValueError for another scorer."""
    judge = make_scorer(spec, None, device, role="judge")
    if not isinstance(judge, ClipScorer):
        raise UserError(
            f"judge={spec!r}: must be a CLIP, which tells captions apart: FOLDER, ARCHITECTURE:FILE, "
            "ARCHITECTURE:PRETRAINED_TAG or hf-hub:OWNER/NAME"
        )
    return judge


@dataclass(frozen=True)
class Neighbour:
    """The training picture nearest to another, and the cosine similarity of their features."""

    path: Path
    similarity: float

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.path.name, "similarity": self.similarity}


@dataclass(frozen=True, kw_only=True)
class ClipMetrics:
    """A CLIP's measures of the pictures drawn for held-out captions."""

    judge: str
    captions: list[str]
    samples: list[Samples]
    by_best_of: dict[int, Proportion]
    """How often the right caption ranks first, by the number of pictures from which the best was chosen."""
    on_drawings: Proportion  # the same for the real drawings
    candidates: int  # candidate captions
    distances: Distances
    neighbours: list[Neighbour]  # of each prompt's best picture; empty if there was no search
    drawings_neighbours: list[Neighbour]  # of held-out drawings, which cannot be copies


def measure_clip(
    clip: ClipScorer,
    name: str,
    captions: Sequence[str],
    samples: Sequence[Samples],
    *,
    drawings: Sequence[Path],
    sets: Mapping[str, Tensor],
    training: Sequence[Path],
    on_batch: OnBatch,
) -> ClipMetrics:
    """Compare pictures with captions, drawings and training pictures.

    Args:
        drawings: files of the captions' real drawings.
        sets: the pictures to compare, uint8 [N, 3, S, S] each, named as in `Distances`.
        training: files of training pictures, in which nearest neighbours are searched.
        on_batch: called with the number of further training pictures searched.
    """
    text_features = clip.text_features(captions)

    def features_of(pictures: Sequence[Image.Image]) -> Tensor:
        return clip.image_features([picture.convert("RGB") for picture in pictures])

    def accuracy(pictures: Sequence[Image.Image]) -> Proportion:
        share = right_caption_first(features_of(pictures), text_features, captions, of=CANDIDATES)
        return Proportion(round(share * len(captions)), len(captions))

    def training_features() -> Iterator[Tensor]:
        for start in range(0, len(training), BATCH):
            paths = training[start : start + BATCH]
            yield features_of([open_drawing(path) for path in paths])
            on_batch(len(paths))

    features = {
        name: torch.cat([clip.image_features(batch.float() / 255) for batch in pixels.split(BATCH)])
        for name, pixels in sets.items()
    }
    found = nearest(torch.cat([features["drawn"], features["real"]]), training_features())
    pairs = zip(*(part.tolist() for part in found), strict=True)
    neighbours = [Neighbour(training[row], similarity) for row, similarity in pairs if row >= 0]
    return ClipMetrics(
        judge=name,
        captions=list(captions),
        samples=list(samples),
        by_best_of={count: accuracy([each.best_of[count] for each in samples]) for count in samples[0].best_of},
        on_drawings=accuracy([open_drawing(path) for path in drawings]),
        candidates=min(CANDIDATES, len({*captions})),
        distances=Distances.between(features, kernel_distance),
        neighbours=neighbours[: len(samples)],
        drawings_neighbours=neighbours[len(samples) :],
    )


def same_clip(clip: ClipScorer, scorer: Scorer | None) -> bool:
    """Whether a scorer is this CLIP, judged by its weights."""
    if not isinstance(scorer, ClipScorer):
        return False
    first, second = clip.model.state_dict(), scorer.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
