"""The whole evaluation: what is measured of a model folder, in order."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip import ClipScorer
from dalle_lean.progress import OnProgress
from dalle_lean.thing_classifier import ThingClassifier
from inference.evaluation.asking import Answer, Attributes, ask_all, few_of, rights
from inference.evaluation.claims import Claim, compare, decide_together
from inference.evaluation.codes import Bits, measure_bits
from inference.evaluation.inception import Inception
from inference.evaluation.judging import Judged, judge_all
from inference.evaluation.likeness import Distances, frechet_distance
from inference.evaluation.listing import drawing_path, of_the_same_kinds, read_lines, read_pixels, sample
from inference.evaluation.questions import Question, choose_questions, commonest, right_on_drawings, subjects
from inference.evaluation.reconstruction import Reconstruction, encode, reconstruct
from inference.evaluation.shares import Share, share
from inference.evaluation.things import Recognised, recognise
from inference.evaluation.ways import GRID_PICTURES, Way, claims_of_ways, ways_to_try
from inference.generator import Generator, Settings


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
                raise ValueError(f"{name}={counts}: numbers of pictures from 1 up, each larger than the one before")
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
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
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


def evaluate(
    generator: Generator,
    data: Path,
    sizes: Sizes = Sizes(),
    *,
    seed: int = 0,
    judge: ClipScorer | None = None,
    classifier: ThingClassifier | None = None,
    inception: Inception | None = None,
    batch_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure a model on a folder that has train/ and heldout/, as `make data` writes it.

    Args:
        judge: a CLIP that did not rank the pictures; without it the one that did judges the captions.
        classifier: which learnt from drawings of other sets, to tell which thing is drawn.
        inception: in whose features the Frechet distance is measured.
        seed: of what is chosen and drawn.
        on_progress: called with (done, total, what): prompts, pictures or captions.

    Raises ValueError where the folder is none such.
    """
    heldout, train = (read_lines(data / part) for part in ("heldout", "train"))
    best_of = sizes.best_of if generator.scorer is not None else (1,)
    settings = Settings(num_images=best_of[-1], best=best_of[-1], seed=seed, guidance=generator.guidance)

    def progress(what: str, total: int) -> Callable[[int], None]:
        so_far = [0]

        def count(done: int) -> None:
            so_far[0] += done
            if on_progress is not None:
                on_progress(so_far[0], total, what)

        return count

    seen = {line["text"] for line in train}
    # Of things that training never saw, and of captions that it did, nothing is drawn.
    fair = [line for line in heldout if line.get("held_out") != "concept" and line["text"] not in seen]
    chosen = sample(list({line["text"]: line for line in fair}.values()), sizes.captions, f"{seed}/captions")
    lines = sample(heldout, sizes.pictures, f"{seed}/pictures")
    files = {line["file_name"] for line in fair}
    rows = [row for row, line in enumerate(lines) if line["file_name"] in files]
    real, floor = rows[::2], rows[1::2]
    if len(chosen) < 2 or len(floor) < 2:
        raise ValueError(
            f"{data / 'heldout'}: {len(chosen)} captions to draw and {len(rows)} pictures to compare with them that "
            "training never saw, of known things; at least 2 and 4 are needed"
        )
    side = generator.picture_side
    pixels = read_pixels(data / "heldout", lines, side)
    measured, codes, made = reconstruct(generator.vqgan, pixels, progress("reconstructions", len(lines)))
    train_lines = sample(train, sizes.train_pictures, f"{seed}/train")
    train_pixels = read_pixels(data / "train", train_lines, side)
    train_codes = encode(generator.vqgan, train_pixels, progress("training pictures", len(train_lines)))
    bits = measure_bits(
        generator, [line["text"] for line in lines], codes, train_codes, progress("held-out captions", 3 * len(lines))
    )

    def draw(prompts: Sequence[str], what: str, settings: Settings, best_of: Sequence[int]) -> list[Answer]:
        return ask_all(generator, prompts, settings, best_of, batch_size, progress(what, len(prompts)))

    def ask(questions: list[Question], what: str, settings: Settings, best_of: Sequence[int]) -> list[Answer]:
        prompts = [question.prompt for question in questions]
        return draw(prompts, f"{what} of {questions[0].attribute}", settings, best_of)

    asked = choose_questions(data / "heldout", sizes.questions, seed)
    attributes = {}
    for name, questions in asked.items():
        answers = ask(questions, "questions", settings, best_of)
        attributes[name] = Attributes(
            questions,
            answers,
            {count: share(rights(questions, answers, count)) for count in best_of},
            Share(right_on_drawings(questions), len(questions)),
            Share(commonest(questions), len(questions)),
        )
    recognised = None if classifier is None else recognise(classifier, list(attributes.values()), best_of, seed)
    clip, judged, distances = judge or generator.scorer, None, None
    if isinstance(clip, ClipScorer) or inception is not None:
        texts = [line["text"] for line in chosen]
        answers = draw(texts, "captions", settings, best_of)
        sets = {
            "real": pixels[real],
            "drawn": to_pixels([answer.by_count[best_of[-1]] for answer in answers]),
            "floor": made[floor],
            "trained": train_pixels[of_the_same_kinds(train_lines, chosen)],
        }
        if isinstance(clip, ClipScorer):
            looked = sample(train, sizes.nearest_among, f"{seed}/nearest")
            judged = judge_all(
                clip,
                clip.name + (", which chose the pictures too" if is_ranker(clip, generator) else ""),
                texts,
                answers,
                best_of=best_of,
                drawings=[drawing_path(data / "heldout", line) for line in chosen],
                sets=sets,
                among=[drawing_path(data / "train", line) for line in looked],
                on_looked=progress("training pictures looked through", len(looked)),
            )
        if inception is not None:
            # The fewer pictures, the larger the distance: as many of each are compared.
            count = min(map(len, sets.values()))
            sets = {name: found if name == "real" else spread(found, count) for name, found in sets.items()}
            look = progress("pictures for the Inception network", sum(map(len, sets.values())))
            features = {name: inception.features(found, look) for name, found in sets.items()}
            distances = Distances.between(features, frechet_distance)
    answered = [(found.questions, found.answers) for found in attributes.values()]
    curve = {}
    if generator.scorer is not None and sizes.curve_questions:
        settings_of_curve = replace(settings, num_images=sizes.curve[-1], best=sizes.curve[-1])
        answered = []
        for name, questions in asked.items():
            few = questions[: sizes.curve_questions]
            answered.append((few, ask(few, f"best of {sizes.curve[-1]}: questions", settings_of_curve, sizes.curve)))
            curve[name] = {count: share(rights(*answered[-1], count)) for count in sizes.curve}
    grid = {}
    pictures = min(GRID_PICTURES, best_of[-1])
    of_grid = {name: questions[: sizes.grid_questions] for name, questions in asked.items() if sizes.grid_questions}
    for way in ways_to_try(generator.caption_dropout) if of_grid else ():
        drawn = replace(settings, num_images=pictures, best=pictures, **way._asdict())
        grid[way] = {
            name: rights(questions, ask(questions, f"{way}: questions", drawn, (pictures,)), pictures)
            for name, questions in of_grid.items()
        }
    claims = decide_together([*claims_of_ranking(generator, answered), *claims_of_ways(grid)])
    return Evaluation(
        generator.model_sha256,
        sizes,
        settings,
        None if generator.scorer is None else generator.scorer.name,
        generator.caption_dropout,
        measured,
        bits,
        attributes,
        curve,
        recognised,
        judged,
        distances,
        grid,
        claims,
    )


def is_ranker(clip: ClipScorer, generator: Generator) -> bool:
    """Whether a CLIP is the one that chooses the pictures, by its weights."""
    if not isinstance(generator.scorer, ClipScorer):
        return False
    first, second = clip.model.state_dict(), generator.scorer.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def claims_of_ranking(generator: Generator, answered: Sequence[tuple[list[Question], list[Answer]]]) -> list[Claim]:
    """That the best few of the pictures of a prompt are right more often than the first few."""
    pairs = [pair for questions, answers in answered for pair in zip(questions, answers, strict=True)]
    count = max((max(answer.by_count) for _, answer in pairs), default=1)
    if generator.scorer is None or count == 1:
        return []
    return [
        compare(
            f"To choose the best {few_of(count)} of {count} pictures by {generator.scorer.name} helps",
            [sum(map(question.is_right, answer.best)) for question, answer in pairs],
            [sum(map(question.is_right, answer.first)) for question, answer in pairs],
        )
    ]


def spread(items: Tensor, count: int) -> Tensor:
    """So many of the items, from the first to the last."""
    return items[torch.linspace(0, len(items) - 1, count).long()]


def to_pixels(pictures: Sequence[Image.Image]) -> Tensor:
    """uint8 [N, 3, S, S]."""
    return torch.from_numpy(np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])).permute(0, 3, 1, 2)
