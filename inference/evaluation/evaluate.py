"""The whole evaluation: what is measured of a model folder, in order, and its report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.clip import ClipScorer
from dalle_lean.pictures import square_pixels
from dalle_lean.progress import OnProgress
from inference.evaluation.asking import Answer, Attributes, ask_all, share_right
from inference.evaluation.codes import Bits, measure_bits
from inference.evaluation.judging import Judged, judge_all
from inference.evaluation.likeness import thing_names
from inference.evaluation.questions import Question, choose_questions, read_lines, right_on_drawings, sample
from inference.evaluation.reconstruction import Reconstruction, reconstruct
from inference.evaluation.shares import Share
from inference.generator import Generator, Settings

GRID = ((0, 1.0, 1.0), (256, 1.0, 1.0), (0, 0.75, 1.0), (256, 0.75, 1.0), (256, 0.75, 0.7), (64, 0.5, 1.0))
"""top-k, top-p, temperature; 0 and 1 are off."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    best_of: tuple[int, ...] = (1, 4, 16)
    """The shares are told of the best of the last; the others draw the curve."""
    questions: int = 60
    """Of each attribute."""
    captions: int = 100
    pictures: int = 512
    """Held-out ones, for the tokenizer and the bits."""
    train_pictures: int = 2048
    """From which the count models learn."""
    grid_questions: int = 0
    """Of each attribute, for each choice of top-k, top-p and temperature; 0 leaves the grid out."""

    def __post_init__(self) -> None:
        if not self.best_of or list(self.best_of) != sorted({*self.best_of}) or self.best_of[0] < 1:
            raise ValueError(f"best_of={self.best_of}: numbers of pictures from 1 up, each larger than the one before")
        for name in ("questions", "captions", "pictures", "train_pictures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Evaluation:
    """Everything measured."""

    model_sha256: str | None
    settings: Settings
    reconstruction: Reconstruction
    bits: Bits
    attributes: dict[str, Attributes]
    judged: Judged | None
    grid: list[tuple[tuple[int, float, float], dict[str, Share]]]

    def to_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "model_sha256": self.model_sha256,
            "best_of": self.settings.num_images,
            "tokenizer": self.reconstruction.to_dict(),
            "bits_per_code": self.bits.to_dict(),
            "attributes": {
                name: {
                    "best_of": {str(count): share.to_dict() for count, share in found.by_best_of.items()},
                    "on_drawings": found.on_drawings.to_dict(),
                }
                for name, found in self.attributes.items()
            },
            "judged": self.judged and self.judged.to_dict(),
            "grid": [
                {"top_k": k, "top_p": p, "temperature": t, **{name: share.to_dict() for name, share in shares.items()}}
                for (k, p, t), shares in self.grid
            ],
        }


def evaluate(
    generator: Generator,
    data: Path,
    sizes: Sizes = Sizes(),
    *,
    seed: int = 0,
    judge: ClipScorer | None = None,
    batch_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure a model on a folder that has train/ and heldout/, as `make data` writes it.

    Args:
        judge: a CLIP that did not rank the pictures; without it the model's own judges the captions.
        on_progress: called with (done, total, what): prompts, pictures or captions.

    Raises ValueError where the folder is none such.
    """
    heldout, train = (read_lines(data / part) for part in ("heldout", "train"))
    settings = Settings(num_images=sizes.best_of[-1], best=sizes.best_of[-1], seed=seed)

    def progress(what: str, total: int) -> Callable[[int], None]:
        so_far = [0]

        def count(done: int) -> None:
            so_far[0] += done
            if on_progress is not None:
                on_progress(so_far[0], total, what)

        return count

    lines = sample(heldout, sizes.pictures, f"{seed}/pictures")
    side = generator.picture_side
    pixels = read_pixels(data / "heldout", lines, side)
    measured, codes, made = reconstruct(generator.vqgan, pixels, progress("reconstructions", len(lines)))
    train_lines = sample(train, sizes.train_pictures, f"{seed}/train")
    train_pixels = read_pixels(data / "train", train_lines, side)
    train_codes = reconstruct(generator.vqgan, train_pixels, progress("training pictures", len(train_lines)))[1]
    bits = measure_bits(
        generator, [line["text"] for line in lines], codes, train_codes, progress("held-out captions", 3 * len(lines))
    )

    def answer(prompts: Sequence[str], what: str, drawn: Settings = settings) -> list[Answer]:
        step = progress(what, len(prompts))
        return ask_all(generator, prompts, drawn, batch_size, lambda _done: step(1))

    def ask(questions: list[Question], drawn: Settings = settings) -> list[Answer]:
        return answer([question.prompt for question in questions], f"questions of {questions[0].attribute}", drawn)

    asked = choose_questions(data / "heldout", sizes.questions, seed)
    attributes = {}
    for name, questions in asked.items():
        answers = ask(questions)
        attributes[name] = Attributes(
            questions,
            answers,
            {count: share_right(questions, answers, count) for count in sizes.best_of},
            Share(right_on_drawings(questions), len(questions)),
        )
    clip, judged = judge or generator.scorer, None
    if isinstance(clip, ClipScorer):
        known = list({line["text"]: line for line in heldout if line.get("held_out") != "concept"}.values())
        chosen = sample(known, sizes.captions, f"{seed}/captions")
        judged = judge_all(
            clip,
            "the model's own CLIP, which chose them too" if judge is None else judge.name,
            chosen,
            answer([line["text"] for line in chosen], "captions"),
            attributes.get("ground"),
            thing_names([*train, *heldout]),
            best_of=sizes.best_of,
            folder=data / "heldout",
            real=pixels,
            reconstructed=made,
            trained=train_pixels,
            seed=seed,
        )
    grid = []
    for top_k, top_p, temperature in GRID if sizes.grid_questions else ():
        drawn = replace(settings, top_k=top_k, top_p=top_p, temperature=temperature)
        few = {name: questions[: sizes.grid_questions] for name, questions in asked.items()}
        shares = {
            name: share_right(questions, ask(questions, drawn), drawn.num_images) for name, questions in few.items()
        }
        grid.append(((top_k, top_p, temperature), shares))
    return Evaluation(generator.model_sha256, settings, measured, bits, attributes, judged, grid)


def read_pixels(folder: Path, lines: Sequence[dict[str, Any]], side: int) -> Tensor:
    """uint8 [N, 3, S, S] of the pictures of these lines; ValueError for one that is missing or broken."""
    pictures = torch.empty(len(lines), 3, side, side, dtype=torch.uint8)
    for row, line in enumerate(lines):
        try:
            with Image.open(folder / line["file_name"]) as picture:
                pictures[row] = torch.from_numpy(square_pixels(picture, side).copy()).permute(2, 0, 1)
        except OSError as error:
            raise ValueError(f"{folder / line['file_name']} cannot be read: {error}") from None
    return pictures
