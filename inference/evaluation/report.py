"""An evaluation as a folder: report.html for people, report.json for programs."""

from collections.abc import Iterable
from pathlib import Path

from dalle_lean.files import atomic_write, write_json
from inference.evaluation.evaluate import Evaluation
from inference.evaluation.page import figure, heading, page, paragraph, plot, table
from inference.evaluation.questions import ATTRIBUTES
from inference.evaluation.shares import Share

SHOWN = 12
"""Pictures of each attribute."""


def write_report(folder: Path, evaluation: Evaluation, title: str) -> None:
    """report.json and report.html; the page needs no other file."""
    with atomic_write(folder / "report.html") as temporary:
        temporary.write_text(page(title, list(sections(evaluation))), encoding="utf-8")
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
        ("count model, codes alone", f"{bits.counts:.3f}"),
        ("count model, a table for each place", f"{bits.counts_by_place:.3f}"),
    ]
    for name, attribute in evaluation.attributes.items():
        found.append((f"{ATTRIBUTES[name].title}, best of {most}", str(attribute.by_best_of[most])))
        found.append(("the same judge on the real drawings", str(attribute.on_drawings)))
    if evaluation.judged is not None:
        judged, distances = evaluation.judged, evaluation.judged.distances
        found.append((f"right caption first of 50, best of {most}", str(judged.captions[most])))
        found.append(("the same judge on the real drawings", str(judged.captions_on_drawings)))
        if judged.things:
            found.append((f"right thing first of 200, best of {most}", str(judged.things[most])))
            found.append(("the same judge on the real drawings", str(judged.things_on_drawings)))
        found.append(("kernel distance to held-out drawings", f"{distances.drawn:.4f}"))
        found.append(("the same of the tokenizer's reconstructions", f"{distances.floor:.4f}"))
        found.append(("the same of training pictures", f"{distances.trained:.4f}"))
    return found


def sections(evaluation: Evaluation) -> Iterable[str]:
    """The page from top to bottom."""
    yield paragraph(
        "Prompts that training never saw: things on grounds, in colours and beside things with which they were never "
        "shown. Shares stand with their 95 % confidence interval (Wilson). "
        f"Of each prompt {evaluation.settings.num_images} pictures were drawn with top-k "
        f"{evaluation.settings.top_k}, top-p {evaluation.settings.top_p:g}, seed {evaluation.settings.seed}; "
        "the model's own ranker chose the best of them."
    )
    yield table(("measure", "value"), rows(evaluation))
    if evaluation.judged is not None:
        yield paragraph(f"Captions, things and distances are by {evaluation.judged.judge}.")
    yield heading("How much choosing helps")
    curves = {ATTRIBUTES[name].title: found.by_best_of for name, found in evaluation.attributes.items()}
    if evaluation.judged is not None:
        curves["right caption first of 50"] = evaluation.judged.captions
        if evaluation.judged.things:
            curves["right thing first of 200"] = evaluation.judged.things
    if curves:
        yield plot({name: points(shares) for name, shares in curves.items()}, "best of so many pictures", "share right")
    if evaluation.grid:
        yield heading("How codes are drawn")
        names = list(evaluation.grid[0][1])
        header = ("top-k", "top-p", "temperature", *(ATTRIBUTES[name].title for name in names))
        yield table(
            header,
            [
                (k or "off", p if p < 1 else "off", t, *(str(shares[n]) for n in names))
                for (k, p, t), shares in evaluation.grid
            ],
        )
    for name, found in evaluation.attributes.items():
        yield heading(ATTRIBUTES[name].title)
        for question, answer in list(zip(found.questions, found.answers, strict=True))[:SHOWN]:
            best = answer.best_of(evaluation.settings.num_images)
            yield figure(best, question.prompt, question.is_right(best))
    if evaluation.judged is not None:
        yield heading("Captions, each with the nearest of the training pictures that were looked at")
        judged = evaluation.judged
        for text, answer, (copy, similarity) in list(zip(judged.texts, judged.answers, judged.copies, strict=True))[
            :SHOWN
        ]:
            yield figure(answer.best_of(evaluation.settings.num_images), text)
            yield figure(copy, f"nearest, {similarity:.2f} alike")


def points(shares: dict[int, Share]) -> list[tuple[float, float]]:
    """Of a curve."""
    return [(count, share.value) for count, share in shares.items()]
