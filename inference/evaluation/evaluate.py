"""The whole evaluation of a model folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.progress import OnProgress, unwatched
from inference.evaluation.attribute_accuracy import (
    AttributeAccuracy,
    Grid,
    accuracy_on_drawings,
    compare_ranking,
    compare_settings,
    measure_attributes,
    measure_grid,
)
from inference.evaluation.bits_per_code import BitsPerCode, measure_bits
from inference.evaluation.classification import (
    HELD_OUT_PAIRS,
    ThingAccuracy,
    check_classifier,
    choose_thing_questions,
    judge_things,
    single_thing_samples,
)
from inference.evaluation.clip_metrics import ClipMetrics, measure_clip, same_clip
from inference.evaluation.distribution_metrics import Distances, Inception, frechet_distance
from inference.evaluation.eval_data import EvalConfig, EvalData, choose_data
from inference.evaluation.prompt_sampling import PromptSampler
from inference.evaluation.questions import AttributeQuestion, choose_questions
from inference.evaluation.reconstruction import Reconstruction, encode, kept_on_other_ground, reconstruct
from inference.evaluation.stats import Comparison, Proportion, holm
from inference.generator import Generator
from inference.request import Settings


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All results."""

    model_sha256: str | None
    config: EvalConfig
    settings: Settings
    ranker: str | None  # the scorer that chose the best pictures; None if nothing did
    caption_dropout: float | None  # of the model's training; None is unknown
    reconstruction: Reconstruction
    kept_on_other_ground: float | None  # see `reconstruction.kept_on_other_ground`
    bits: BitsPerCode
    attributes: dict[str, AttributeAccuracy]
    on_drawings: dict[str, Proportion]  # the pixel judge's own accuracy for each attribute, on the real drawings
    curve: dict[str, AttributeAccuracy]
    """The first questions of each attribute, with more pictures; empty if nothing ranks them."""
    things: list[ThingAccuracy]  # for each classifier and kind of prompts
    clip: ClipMetrics | None
    inception: Distances | None  # Frechet inception distances
    grid: Grid
    comparisons: list[Comparison]


def evaluate(
    generator: Generator,
    folder: Path,
    config: EvalConfig = EvalConfig(),
    *,
    seed: int = 0,
    judge: ClipScorer | None = None,
    classifiers: Mapping[str, ThingClassifier] = {},
    inception: Inception | None = None,
    batch_size: int | None = None,
    on_progress: OnProgress = unwatched,
) -> Evaluation:
    """Measure a model on a folder that has train/ and heldout/, as `make data` writes it.

    ValueError for another kind of folder, for too few pictures, and for a classifier that knows none of the things.

    Args:
        seed: chooses the prompts, pictures and noise.
        judge: a CLIP that did not rank the pictures, to judge captions; None is the one that ranked them.
        classifiers: by their names in the report; they recognise the things drawn and learnt from other pictures.
        inception: its features give the Frechet distance; None measures none.
        on_progress: called with (done, total, note) for prompts, pictures or captions.
    """
    scorer = generator.scorer
    best_of = (1,) if scorer is None else config.best_of
    settings = Settings(num_images=best_of[-1], best=best_of[-1], seed=seed, guidance=generator.guidance)
    sampler = PromptSampler(generator, settings, batch_size, on_progress)
    data = choose_data(folder, config, seed, generator.picture_side)
    questions = choose_questions(folder / "heldout", config.questions, seed)
    for name, classifier in classifiers.items():
        check_classifier(name, [question for asked in questions.values() for question in asked], classifier)
    thing_questions = choose_thing_questions(folder, config.questions, seed) if classifiers else {}
    on_drawings = {name: accuracy_on_drawings(asked) for name, asked in questions.items()}
    count = len(data.heldout)
    reconstruction, codes, reconstructed = reconstruct(
        generator.vqgan, data.heldout_pixels, sampler.counter("reconstructions", count)
    )
    kept = kept_on_other_ground(generator.vqgan, data.heldout_pixels, codes, sampler.counter("other grounds", count))
    training = sampler.counter("training pictures", len(data.train_pixels))
    train_codes = encode(generator.vqgan, data.train_pixels, training)
    captions = [line["text"] for line in data.heldout]
    bits = measure_bits(generator, captions, codes, train_codes, sampler.counter("held-out captions", 3 * count), seed)
    attributes = measure_attributes(sampler, questions, "questions", best_of)
    drawn = {HELD_OUT_PAIRS: single_thing_samples(attributes)}
    for prompts, asked in thing_questions.items():
        samples = sampler.draw([question.prompt for question in asked], f"questions about things {prompts}", best_of)
        drawn[prompts] = list(zip(asked, samples, strict=True))
    things = [
        found
        for name, classifier in classifiers.items()
        for prompts, answered in drawn.items()
        for found in judge_things(name, classifier, generator.vqgan, prompts, answered, seed)
    ]
    clip, distances = measure_captions(sampler, data, reconstructed, judge, inception, best_of)
    few = {} if scorer is None else first_questions(questions, config.curve_questions)
    curve = measure_attributes(sampler, few, f"best of {config.curve[-1]}: questions", config.curve)
    grid = measure_grid(sampler, first_questions(questions, config.grid_questions))
    ranking = [] if scorer is None else compare_ranking(scorer.name, (curve or attributes).values())
    return Evaluation(
        model_sha256=generator.model_sha256,
        config=config,
        settings=settings,
        ranker=None if scorer is None else scorer.name,
        caption_dropout=generator.caption_dropout,
        reconstruction=reconstruction,
        kept_on_other_ground=kept,
        bits=bits,
        attributes=attributes,
        on_drawings=on_drawings,
        curve=curve,
        things=things,
        clip=clip,
        inception=distances,
        grid=grid,
        comparisons=holm([*ranking, *compare_settings(grid)]),
    )


def first_questions(questions: dict[str, list[AttributeQuestion]], count: int) -> dict[str, list[AttributeQuestion]]:
    """The first `count` questions of each attribute; no attributes if `count` is 0."""
    return {name: asked[:count] for name, asked in questions.items()} if count else {}


def measure_captions(
    sampler: PromptSampler,
    data: EvalData,
    reconstructed: Tensor,
    judge: ClipScorer | None,
    inception: Inception | None,
    best_of: tuple[int, ...],
) -> tuple[ClipMetrics | None, Distances | None]:
    """Draw the captions and measure them by a CLIP and an Inception network; (None, None) if there is neither.

    reconstructed: the held-out pictures through the tokenizer, uint8 [N, 3, S, S].
    """
    scorer = sampler.generator.scorer
    clip = judge or scorer
    if not isinstance(clip, ClipScorer) and inception is None:
        return None, None
    captions = [line["text"] for line in data.to_draw]
    samples = sampler.draw(captions, "captions", best_of)
    sets = {
        "real": data.heldout_pixels[data.real],
        "drawn": to_pixels([each.best_of[best_of[-1]] for each in samples]),
        "floor": reconstructed[data.floor],
        "trained": data.train_pixels[data.trained],
    }
    metrics = distances = None
    if isinstance(clip, ClipScorer):
        metrics = measure_clip(
            clip,
            clip.name + (", which chose the pictures too" if same_clip(clip, scorer) else ""),
            captions,
            samples,
            drawings=data.drawings,
            sets=sets,
            training=data.neighbours,
            on_batch=sampler.counter("training pictures looked through", len(data.neighbours)),
        )
    if inception is not None:
        # The distance falls as the number of pictures grows, so all sets compared get the same number.
        count = min(map(len, sets.values()))
        sets = {name: pixels if name == "real" else spread(pixels, count) for name, pixels in sets.items()}
        counter = sampler.counter("pictures for the Inception network", sum(map(len, sets.values())))
        features = {name: inception.features(pixels, counter) for name, pixels in sets.items()}
        distances = Distances.between(features, frechet_distance)
    return metrics, distances


def spread(items: Tensor, count: int) -> Tensor:
    """`count` evenly spaced items, from the first to the last."""
    return items[torch.linspace(0, len(items) - 1, count).long()]


def to_pixels(pictures: Sequence[Image.Image]) -> Tensor:
    """PIL images -> uint8 [N, 3, S, S]."""
    return torch.from_numpy(np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])).permute(0, 3, 1, 2)
