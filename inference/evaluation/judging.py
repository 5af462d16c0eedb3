"""What a CLIP says of the pictures: best one that neither ranked them nor learnt from the same drawings."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip import ClipScorer, right_caption_first
from inference.evaluation.asking import Answer, Attributes
from inference.evaluation.likeness import Distances, kernel_distance, nearest, right_thing
from inference.evaluation.shares import Share
from inference.scorer import make_scorer

CAPTIONS_COMPETE = 50
THINGS_COMPETE = 200
BATCH = 64


def make_judge(spec: str, device: torch.device) -> ClipScorer:
    """The CLIP that a person asked for, named as a scorer; ValueError where it is none."""
    judge = make_scorer(spec, None, device, role="judge")
    if not isinstance(judge, ClipScorer):
        raise ValueError(
            f"judge={spec!r}: must be a CLIP, which tells captions apart: FOLDER, ARCHITECTURE:FILE, "
            "ARCHITECTURE:PRETRAINED_TAG or hf-hub:OWNER/NAME"
        )
    return judge


@dataclass(frozen=True)
class Judged:
    """Shares of pictures that a CLIP finds right, by the number of which the best was chosen."""

    judge: str
    texts: list[str]
    answers: list[Answer]
    captions: dict[int, Share]
    """The right caption comes first of 50."""
    captions_on_drawings: Share
    things: dict[int, Share]
    """The right thing comes first of 200; empty where the data names no things."""
    things_on_drawings: Share
    distances: Distances
    copies: list[tuple[Image.Image, float]]
    """Of each answer's best picture, the nearest training picture and the cosine similarity of their features; empty
    where none was looked for."""

    def to_dict(self) -> dict[str, Any]:
        """For a report."""

        def by_count(shares: dict[int, Share]) -> dict[str, Any]:
            return {str(count): share.to_dict() for count, share in shares.items()}

        return {
            "judge": self.judge,
            "right_caption_first_of_50": {
                "best_of": by_count(self.captions),
                "on_drawings": self.captions_on_drawings.to_dict(),
            },
            "right_thing_first_of_200": {
                "best_of": by_count(self.things),
                "on_drawings": self.things_on_drawings.to_dict(),
            },
            "kernel_distance": self.distances.to_dict(),
            "nearest_training_picture": [similarity for _, similarity in self.copies],
        }


def judge_all(
    clip: ClipScorer,
    name: str,
    lines: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer],
    scenes: Attributes | None,
    names: Mapping[str, str],
    *,
    best_of: Sequence[int],
    folder: Path,
    sets: Mapping[str, Tensor],
    among: Sequence[Path] = (),
    seed: int = 0,
    on_looked: Callable[[int], None] = lambda done: None,
) -> Judged:
    """Ask a CLIP.

    Args:
        lines: of held-out pictures whose captions were drawn; `answers` are those drawings, `folder` has the real ones.
        scenes: questions whose pictures show one thing.
        names: things and their captions.
        sets: uint8 [N, 3, S, S] each, to compare, as in `Distances`.
        among: files of training pictures, of which the nearest are looked for.
        on_looked: called with how many of these were looked at.
    """
    texts = [line["text"] for line in lines]
    text_features = clip.text_features(texts)

    def seen(pictures: Sequence[Image.Image]) -> Tensor:
        return clip.image_features([picture.convert("RGB") for picture in pictures])

    def caption_first(features: Tensor) -> Share:
        found = right_caption_first(features, text_features, texts, of=CAPTIONS_COMPETE)
        return Share(round(found * len(texts)), len(texts))

    best = {count: seen([answer.by_count[count] for answer in answers]) for count in best_of}
    things, things_on_drawings = {}, Share(0, 0)
    if scenes is not None:
        of_thing = ThingJudge(clip, [question.thing for question in scenes.questions], names, seed)
        things = {count: of_thing(seen([answer.by_count[count] for answer in scenes.answers])) for count in best_of}
        things_on_drawings = of_thing(seen([Image.open(question.drawing) for question in scenes.questions]))
    features = {
        name: torch.cat([clip.image_features(batch.float() / 255) for batch in found.split(BATCH)])
        for name, found in sets.items()
    }

    def looked_at() -> Iterator[Tensor]:
        for start in range(0, len(among), BATCH):
            paths = among[start : start + BATCH]
            yield seen([Image.open(path) for path in paths])
            on_looked(len(paths))

    rows, similarities = nearest(features["drawn"], looked_at())
    return Judged(
        name,
        texts,
        list(answers),
        {count: caption_first(found) for count, found in best.items()},
        caption_first(seen([Image.open(folder / line["file_name"]) for line in lines])),
        things,
        things_on_drawings,
        Distances.between(features, kernel_distance),
        [
            (Image.open(among[row]).convert("RGB"), float(similarity))
            for row, similarity in zip(rows.tolist(), similarities, strict=True)
            if row >= 0
        ],
    )


class ThingJudge:
    """Tells pictures of known things from those of others, drawn at random.

    Args:
        things: what picture i shows.
        names: all things and their captions.
    """

    def __init__(self, clip: ClipScorer, things: Sequence[str], names: Mapping[str, str], seed: int):
        asked = sorted({*things})
        others = sorted(names.keys() - {*asked})
        more = random.Random(f"{seed}/things").sample(others, min(max(0, THINGS_COMPETE - len(asked)), len(others)))
        compete = [*asked, *more]
        self.features = clip.text_features([names.get(thing, thing) for thing in compete])
        self.rows = torch.tensor([compete.index(thing) for thing in things])

    def __call__(self, image_features: Tensor) -> Share:
        hits = right_thing(image_features, self.features, self.rows.to(image_features.device))
        return Share(int(hits.sum()), len(hits))
