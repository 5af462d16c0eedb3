"""An evaluation as a folder: report.html for people, report.json for programs, pictures.png to show around."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from dalle_lean.draw.svg_plot import plot
from dalle_lean.io.files import atomic_write, write_json
from inference.evaluation.captions import open_drawing
from inference.evaluation.clip_metrics import Copy
from inference.evaluation.distribution_metrics import Distances
from inference.evaluation.page import figure, heading, page, paragraph, table
from inference.evaluation.proportions import Share, share
from inference.evaluation.questions import ATTRIBUTES, subjects
from inference.evaluation.results import Evaluation
from inference.evaluation.sheet import captioned_sheet
from inference.evaluation.significance import SIGNIFICANT
from inference.gallery import write_png

SHOWN = 12
"""Pictures of each attribute."""
ON_SHEET = 16


def write_report(folder: Path, evaluation: Evaluation, title: str) -> None:
    """report.json, report.html, which needs no other file, and pictures.png of the first 16 captions, if any."""
    with atomic_write(folder / "report.html") as temporary:
        temporary.write_text(page(title, list(sections(evaluation))), encoding="utf-8")
    if evaluation.judged is not None:
        most, judged = evaluation.settings.num_images, evaluation.judged
        pictures = [answer.by_count[most] for answer in judged.answers[:ON_SHEET]]
        write_png(folder / "pictures.png", captioned_sheet(pictures, judged.texts[:ON_SHEET]), {})
    write_json(folder / "report.json", evaluation.to_dict())


def rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """(measure, value) of everything, for a table."""
    most = evaluation.settings.num_images
    kept, bits = evaluation.reconstruction, evaluation.bits
    found = [
        ("tokenizer, PSNR of held-out pictures", f"{kept.psnr_db:.2f} dB"),
        ("tokenizer, SSIM", f"{kept.ssim:.3f}"),
        ("tokenizer, codes in use", f"{kept.codes_used:.1%}, perplexity {kept.perplexity:.0f}"),
        ("held-out bits per image code", f"{bits.model:.3f}"),
        ("the same under another picture's caption", f"{bits.strangers_caption:.3f}"),
        ("the same without a caption", f"{bits.no_caption:.3f}"),
        ("count model of training pictures, codes alone", f"{bits.counts:.3f}"),
        ("count model, a table for each place", f"{bits.counts_by_place:.3f}"),
    ]
    for name, attribute in evaluation.attributes.items():
        found.append((f"{ATTRIBUTES[name].title}, best of {most}", str(attribute.by_best_of[most])))
        found.append(("the same judge on the real drawings", str(attribute.on_drawings)))
        found.append(("the commonest answer to all of them", str(attribute.commonest)))
    if evaluation.recognised is not None:
        recognised = evaluation.recognised
        found.append((f"right thing first of {recognised.compete}, best of {most}", str(recognised.by_best_of[most])))
        found.append(("the same classifier on the real drawings", str(recognised.on_drawings)))
        found.append(("the same on the tokenizer's reconstructions of them", str(recognised.on_reconstructions)))
    if evaluation.judged is not None:
        judged = evaluation.judged
        found.append((f"right caption first of {judged.captions_compete}, best of {most}", str(judged.captions[most])))
        found.append(("the same judge on the real drawings", str(judged.captions_on_drawings)))
        found += distance_rows("kernel distance", judged.distances)
        if judged.copies:
            found.append(("likeness to the nearest training picture, median", f"{likeness(judged.copies):.3f}"))
            found.append(("the same of held-out drawings", f"{likeness(judged.copies_of_drawings):.3f}"))
    if evaluation.inception is not None:
        found += distance_rows("Frechet inception distance", evaluation.inception)
    return found


def likeness(copies: Sequence[Copy]) -> float:
    """The middle similarity, -1..1."""
    return median(copy.similarity for copy in copies)


def distance_rows(name: str, distances: Distances) -> list[tuple[str, str]]:
    """Of the pictures that were drawn, between floor and ceiling."""
    count = distances.pictures
    return [
        (f"{name} of {count['drawn']} pictures to {count['real']} held-out drawings", f"{distances.drawn:.4g}"),
        (f"the same of the tokenizer's reconstructions ({count['floor']})", f"{distances.floor:.4g}"),
        (f"the same of training pictures ({count['trained']})", f"{distances.trained:.4g}"),
    ]


def sections(evaluation: Evaluation) -> Iterable[str]:
    """The page from top to bottom."""
    yield paragraph(
        "Prompts that training never saw: things on grounds, in colours and beside things with which they were never "
        "shown. Shares stand with their 95 % confidence interval (Wilson). "
        f"Codes were drawn with top-k {evaluation.settings.top_k}, top-p {evaluation.settings.top_p:g}, guidance "
        f"{evaluation.settings.guidance:g}, seed {evaluation.settings.seed}. "
        + (
            "Nothing ranked the pictures: one was drawn of each prompt."
            if evaluation.ranker is None
            else f"Of {evaluation.settings.num_images} pictures of each prompt {evaluation.ranker} chose the best."
        )
    )
    yield table(("measure", "value"), rows(evaluation))
    if evaluation.judged is not None:
        yield paragraph(f"Captions and kernel distances are by {evaluation.judged.judge}.")
    if evaluation.recognised is not None:
        recognised = evaluation.recognised
        yield paragraph(
            f"Things are told by a classifier, in {recognised.on_drawings.of} prompts about "
            f"{recognised.different_things} different things, on grounds, in colours and of sizes; "
            f"{recognised.left_out} prompts about things that it does not know are left out."
        )
    if evaluation.inception is not None:
        yield paragraph(
            "A Frechet distance of few pictures is too large; only those of as many pictures can be compared, and "
            "published ones are of 10,000 and more."
        )
    if evaluation.claims:
        yield heading("What helps")
        yield from (paragraph(str(claim)) for claim in evaluation.claims)
        yield paragraph(
            f"A claim is decided where p is below {SIGNIFICANT:g}: exact sign tests of the same prompts, with p raised "
            "for the number of claims (Holm)."
        )
    curves = curves_of(evaluation)
    if curves and evaluation.ranker is not None:
        counts = sorted({count for shares in curves.values() for count in shares})
        yield heading("How much choosing helps")
        yield plot(
            {name: points(shares) for name, shares in curves.items()},
            across="best of so many pictures",
            up="share right",
            up_range=(0, 1),
            up_text="{:.0%}".format,
            logarithmic=True,
        )
        yield table(
            ("best of", *map(str, counts)),
            [(name, *(shares.get(count, "") for count in counts)) for name, shares in curves.items()],
        )
    if evaluation.grid:
        yield heading("How codes are drawn")
        names = list(next(iter(evaluation.grid.values())))
        yield table(
            ("codes", *(ATTRIBUTES[name].title for name in names)),
            [(way, *(share(found[name]) for name in names)) for way, found in evaluation.grid.items()],
        )
        if not evaluation.caption_dropout:
            yield paragraph(
                "Guidance is left out: "
                + (
                    "the model folder does not tell whether the model learnt without captions."
                    if evaluation.caption_dropout is None
                    else "the model always learnt with captions."
                )
            )
    for name, found in evaluation.attributes.items():
        yield heading(ATTRIBUTES[name].title)
        yield paragraph(f"{len(found.questions)} prompts about {subjects(found.questions)} different things or pairs.")
        for question, answer in list(zip(found.questions, found.answers, strict=True))[:SHOWN]:
            best = answer.by_count[evaluation.settings.num_images]
            yield figure(best, question.prompt, question.is_right(best))
    if evaluation.judged is not None:
        judged = evaluation.judged
        beside = ", each with the training picture that is most like what was drawn" if judged.copies else ""
        yield heading(f"Captions{beside}")
        for row, (text, answer) in enumerate(list(zip(judged.texts, judged.answers, strict=True))[:SHOWN]):
            yield figure(answer.by_count[evaluation.settings.num_images], text)
            for copy in judged.copies[row : row + 1]:
                yield figure(open_drawing(copy.path), f"nearest, {copy.similarity:.2f} alike")


def curves_of(evaluation: Evaluation) -> dict[str, dict[int, Share]]:
    """What is right by how many pictures the best was chosen from."""
    judged = evaluation.judged
    by_name = evaluation.curve or {name: found.by_best_of for name, found in evaluation.attributes.items()}
    curves = {ATTRIBUTES[name].title: shares for name, shares in by_name.items()}
    if evaluation.recognised is not None:
        curves[f"right thing first of {evaluation.recognised.compete}"] = evaluation.recognised.by_best_of
    if judged is not None:
        curves[f"right caption first of {judged.captions_compete}"] = judged.captions
    return curves


def points(shares: dict[int, Share]) -> list[tuple[float, float]]:
    """Of a curve."""
    return [(count, share.value) for count, share in shares.items()]
