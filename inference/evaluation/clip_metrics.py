"""What a CLIP says of the pictures: best one that neither ranked them nor learnt from the same drawings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer, right_caption_first
from dalle_lean.errors import UserError
from inference.evaluation.attribute_accuracy import Answer
from inference.evaluation.captions import open_drawing
from inference.evaluation.distribution_metrics import Distances, kernel_distance, nearest
from inference.evaluation.proportions import Share
from inference.scorer import make_scorer

CAPTIONS_COMPETE = 50
BATCH = 64


def make_judge(spec: str, device: torch.device) -> ClipScorer:
    """The CLIP that a person asked for, named as a scorer; ValueError where it is none."""
    judge = make_scorer(spec, None, device, role="judge")
    if not isinstance(judge, ClipScorer):
        raise UserError(
            f"judge={spec!r}: must be a CLIP, which tells captions apart: FOLDER, ARCHITECTURE:FILE, "
            "ARCHITECTURE:PRETRAINED_TAG or hf-hub:OWNER/NAME"
        )
    return judge


@dataclass(frozen=True)
class Copy:
    """The training picture nearest to another, and the cosine similarity of their features."""

    path: Path
    similarity: float

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {"file": self.path.name, "similarity": self.similarity}


@dataclass(frozen=True)
class Judged:
    """Shares of pictures that a CLIP finds right, by the number of which the best was chosen."""

    judge: str
    texts: list[str]
    answers: list[Answer]
    captions: dict[int, Share]
    """The right caption comes first of `captions_compete`."""
    captions_on_drawings: Share
    captions_compete: int
    distances: Distances
    copies: list[Copy]
    """Of each answer's best picture; empty where none was looked for."""
    copies_of_drawings: list[Copy]
    """The same of held-out drawings: how like training pictures those are that cannot be copied."""

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "judge": self.judge,
            "right_caption_first": {
                "among": self.captions_compete,
                "best_of": {str(count): found.to_dict() for count, found in self.captions.items()},
                "on_drawings": self.captions_on_drawings.to_dict(),
            },
            "kernel_distance": self.distances.to_dict(),
            "nearest_training_picture": {
                "drawn": [copy.to_dict() for copy in self.copies],
                "held_out_drawings": [copy.to_dict() for copy in self.copies_of_drawings],
            },
        }


def judge_all(
    clip: ClipScorer,
    name: str,
    texts: Sequence[str],
    answers: Sequence[Answer],
    *,
    best_of: Sequence[int],
    drawings: Sequence[Path],
    sets: Mapping[str, Tensor],
    among: Sequence[Path] = (),
    on_looked: Callable[[int], None] = lambda done: None,
) -> Judged:
    """Ask a CLIP.

    Args:
        texts: captions that were drawn; `answers` are what was drawn, `drawings` the real ones.
        sets: uint8 [N, 3, S, S] each, to compare, as in `Distances`.
        among: files of training pictures, of which the nearest are looked for.
        on_looked: called with how many of these were looked at.
    """
    text_features = clip.text_features(texts)

    def seen(pictures: Sequence[Image.Image]) -> Tensor:
        return clip.image_features([picture.convert("RGB") for picture in pictures])

    def caption_first(features: Tensor) -> Share:
        found = right_caption_first(features, text_features, texts, of=CAPTIONS_COMPETE)
        return Share(round(found * len(texts)), len(texts))

    best = {count: seen([answer.by_count[count] for answer in answers]) for count in best_of}
    features = {
        name: torch.cat([clip.image_features(batch.float() / 255) for batch in found.split(BATCH)])
        for name, found in sets.items()
    }

    def looked_at() -> Iterator[Tensor]:
        for start in range(0, len(among), BATCH):
            paths = among[start : start + BATCH]
            yield seen([open_drawing(path) for path in paths])
            on_looked(len(paths))

    rows, similarities = nearest(torch.cat([features["drawn"], features["real"]]), looked_at())
    copies = [
        Copy(among[row], similarity)
        for row, similarity in zip(rows.tolist(), similarities.tolist(), strict=True)
        if row >= 0
    ]
    return Judged(
        name,
        list(texts),
        list(answers),
        {count: caption_first(found) for count, found in best.items()},
        caption_first(seen([open_drawing(path) for path in drawings])),
        min(CAPTIONS_COMPETE, len({*texts})),
        Distances.between(features, kernel_distance),
        copies[: len(answers)],
        copies[len(answers) :],
    )
