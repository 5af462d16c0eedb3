"""The whole evaluation: what is measured of a model folder, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.progress import OnProgress
from inference.evaluation.attribute_accuracy import Answer, Asker, Attributes, few_of, rights
from inference.evaluation.bits_per_code import measure_bits
from inference.evaluation.captions import of_the_same_kinds
from inference.evaluation.classification import recognise, refuse_strange_things
from inference.evaluation.clip_metrics import Judged, judge_all
from inference.evaluation.distribution_metrics import Distances, frechet_distance
from inference.evaluation.eval_data import Material, choose_material
from inference.evaluation.inception import Inception
from inference.evaluation.proportions import Share, share
from inference.evaluation.questions import Question, choose_questions, commonest, right_on_drawings
from inference.evaluation.reconstruction import encode, reconstruct
from inference.evaluation.results import Evaluation, Sizes
from inference.evaluation.sampling_grid import GRID_PICTURES, Way, claims_of_ways, ways_to_try
from inference.evaluation.significance import Claim, compare, decide_together
from inference.generator import Generator, Settings

Asked = Mapping[str, list[Question]]
"""Questions of each attribute."""


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

    Raises ValueError where the folder is none such, and where the classifier knows nothing that it shows.
    """
    best_of = sizes.best_of if generator.scorer is not None else (1,)
    settings = Settings(num_images=best_of[-1], best=best_of[-1], seed=seed, guidance=generator.guidance)
    asker = Asker(generator, batch_size, on_progress)
    material = choose_material(data, sizes, seed, generator.picture_side)
    asked = choose_questions(data / "heldout", sizes.questions, seed)
    if classifier is not None:
        refuse_strange_things(asked, classifier)
    count = len(material.lines)
    kept, codes, made = reconstruct(generator.vqgan, material.pixels, asker.progress("reconstructions", count))
    training = asker.progress("training pictures", len(material.train_lines))
    train_codes = encode(generator.vqgan, material.train_pixels, training)
    texts = [line["text"] for line in material.lines]
    bits = measure_bits(generator, texts, codes, train_codes, asker.progress("held-out captions", 3 * count), seed)
    attributes = ask_attributes(asker, asked, settings, best_of)
    recognised = None
    if classifier is not None:
        recognised = recognise(classifier, generator.vqgan, attributes, best_of, seed)
    judged, distances = judge_captions(asker, material, made, judge, inception, settings, best_of)
    curve = ask_curve(asker, asked, settings, sizes) if generator.scorer is not None else {}
    grid = ask_grid(asker, asked, settings, sizes)
    return Evaluation(
        model_sha256=generator.model_sha256,
        sizes=sizes,
        settings=settings,
        ranker=None if generator.scorer is None else generator.scorer.name,
        caption_dropout=generator.caption_dropout,
        reconstruction=kept,
        bits=bits,
        attributes=attributes,
        curve={
            name: {count: share(rights(*answered, count)) for count in sizes.curve} for name, answered in curve.items()
        },
        recognised=recognised,
        judged=judged,
        inception=distances,
        grid=grid,
        claims=decide_together(
            [
                *claims_of_ranking(
                    generator,
                    list(curve.values()) or [(found.questions, found.answers) for found in attributes.values()],
                ),
                *claims_of_ways(grid),
            ]
        ),
    )


def ask_attributes(asker: Asker, asked: Asked, settings: Settings, best_of: Sequence[int]) -> dict[str, Attributes]:
    """Draw and judge all questions."""
    attributes = {}
    for name, questions in asked.items():
        answers = asker.ask(questions, "questions", settings, best_of)
        attributes[name] = Attributes(
            questions,
            answers,
            {count: share(rights(questions, answers, count)) for count in best_of},
            Share(right_on_drawings(questions), len(questions)),
            Share(commonest(questions), len(questions)),
        )
    return attributes


def judge_captions(
    asker: Asker,
    material: Material,
    made: Tensor,
    judge: ClipScorer | None,
    inception: Inception | None,
    settings: Settings,
    best_of: Sequence[int],
) -> tuple[Judged | None, Distances | None]:
    """Draw the captions, and let a CLIP and an Inception network look, where there are such.

    Args:
        made: reconstructions of the material's pictures, uint8 [N, 3, S, S].
    """
    generator = asker.generator
    clip = judge or generator.scorer
    if not isinstance(clip, ClipScorer) and inception is None:
        return None, None
    captions = [line["text"] for line in material.chosen]
    answers = asker.draw(captions, "captions", settings, best_of)
    sets = {
        "real": material.pixels[material.real],
        "drawn": to_pixels([answer.by_count[best_of[-1]] for answer in answers]),
        "floor": made[material.floor],
        "trained": material.train_pixels[of_the_same_kinds(material.train_lines, material.chosen)],
    }
    judged = distances = None
    if isinstance(clip, ClipScorer):
        judged = judge_all(
            clip,
            clip.name + (", which chose the pictures too" if is_ranker(clip, generator) else ""),
            captions,
            answers,
            best_of=best_of,
            drawings=material.drawings,
            sets=sets,
            among=material.looked_through,
            on_looked=asker.progress("training pictures looked through", len(material.looked_through)),
        )
    if inception is not None:
        # The fewer pictures, the larger the distance: as many of each are compared.
        count = min(map(len, sets.values()))
        sets = {name: found if name == "real" else spread(found, count) for name, found in sets.items()}
        look = asker.progress("pictures for the Inception network", sum(map(len, sets.values())))
        features = {name: inception.features(found, look) for name, found in sets.items()}
        distances = Distances.between(features, frechet_distance)
    return judged, distances


def ask_curve(
    asker: Asker, asked: Asked, settings: Settings, sizes: Sizes
) -> dict[str, tuple[list[Question], list[Answer]]]:
    """The first few questions of each attribute, with many pictures; nothing where none are wanted."""
    most = sizes.curve[-1]
    settings = replace(settings, num_images=most, best=most)
    few = {name: questions[: sizes.curve_questions] for name, questions in asked.items() if sizes.curve_questions}
    return {
        name: (questions, asker.ask(questions, f"best of {most}: questions", settings, sizes.curve))
        for name, questions in few.items()
    }


def ask_grid(asker: Asker, asked: Asked, settings: Settings, sizes: Sizes) -> dict[Way, dict[str, list[bool]]]:
    """Whether each of the first few questions is right, by the way of drawing codes; nothing where none are wanted."""
    pictures = min(GRID_PICTURES, settings.num_images)
    few = {name: questions[: sizes.grid_questions] for name, questions in asked.items() if sizes.grid_questions}
    grid: dict[Way, dict[str, list[bool]]] = {}
    for way in ways_to_try(asker.generator.caption_dropout) if few else ():
        drawn = replace(settings, num_images=pictures, best=pictures, **way._asdict())
        grid[way] = {
            name: rights(questions, asker.ask(questions, f"{way}: questions", drawn, (pictures,)), pictures)
            for name, questions in few.items()
        }
    return grid


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
