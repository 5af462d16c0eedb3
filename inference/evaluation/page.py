"""An evaluation as one self-contained HTML page with tables, plots and pictures."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from itertools import islice

from PIL import Image

from dalle_lean.draw.svg_plot import plot
from inference.evaluation.captions import open_drawing
from inference.evaluation.classification import HELD_OUT_PAIRS
from inference.evaluation.evaluate import Evaluation
from inference.evaluation.questions import ATTRIBUTES, num_subjects
from inference.evaluation.stats import SIGNIFICANT, Proportion

SHOWN = 12  # pictures shown of each attribute, and of the captions
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
figure { display: inline-block; margin: 0 .6rem .8rem 0; width: 8.5rem; vertical-align: top; }
figure img { width: 8rem; image-rendering: pixelated; border-radius: .4rem; display: block; }
figcaption { font-size: .8rem; line-height: 1.3; }
.right { border-bottom: .2rem solid #2a2; } .wrong { border-bottom: .2rem solid #d33; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, evaluation: Evaluation, measures: Sequence[tuple[str, str]]) -> str:
    """The whole document; `measures` are (measure, value)."""
    parts = [
        *summary(evaluation, measures),
        *things_table(evaluation),
        *comparison_list(evaluation),
        *ranking_curves(evaluation),
        *sampling_table(evaluation),
        *attribute_pictures(evaluation),
        *caption_pictures(evaluation),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</html>\n"
    )


def summary(evaluation: Evaluation, measures: Sequence[tuple[str, str]]) -> Iterator[str]:
    """How the model was measured, and all figures."""
    settings = evaluation.settings
    yield paragraph(
        "Training never saw these prompts: they ask for things on grounds, in colours and beside things with which "
        "they were never shown. Proportions come with their 95 % confidence interval (Wilson). "
        f"Codes were drawn with top-k {settings.top_k}, top-p {settings.top_p:g}, guidance {settings.guidance:g}, "
        f"seed {settings.seed}. "
        + (
            "Nothing ranked the pictures: one was drawn for each prompt."
            if evaluation.ranker is None
            else f"Of {settings.num_images} pictures for each prompt, {evaluation.ranker} chose the best."
        )
    )
    yield table(("measure", "value"), measures)
    if evaluation.clip is not None:
        yield paragraph(f"Captions and kernel distances are judged by {evaluation.clip.judge}.")
    if evaluation.inception is not None:
        yield paragraph(
            "The Frechet distance of few pictures is too large: compare it only between equal numbers of pictures. "
            "Published distances use 10,000 or more."
        )


def things_table(evaluation: Evaluation) -> Iterator[str]:
    """How often each classifier finds the right thing, beside its accuracy on the real drawings."""
    if not evaluation.things:
        return
    best_of = (f"best of {count}" for count in evaluation.things[0].best_of)
    yield heading("Is it the right thing?")
    yield paragraph(
        "Classifiers judge what was drawn for prompts about one thing, and the real drawings of the same prompts. No "
        "model can be expected to score higher than the real drawings through the tokenizer."
    )
    yield table(
        ("a thing", "judge", "first of", *best_of, "drawings", "through the tokenizer"),
        [
            (each.prompts, each.judge, each.among, *each.best_of.values(), each.on_drawings, each.on_reconstructions)
            for each in evaluation.things
        ],
    )
    for each in evaluation.things:
        if each.left_out:
            yield paragraph(f"{each.judge} does not know the thing of {each.left_out} prompts: {each.prompts}.")


def comparison_list(evaluation: Evaluation) -> Iterator[str]:
    """The comparisons with their verdicts."""
    if not evaluation.comparisons:
        return
    yield heading("What helps")
    yield from (paragraph(str(comparison)) for comparison in evaluation.comparisons)
    yield paragraph(
        f"A claim is decided if p is below {SIGNIFICANT:g}, by exact sign tests on the same prompts with p adjusted "
        "for the number of claims (Holm)."
    )


def ranking_curves(evaluation: Evaluation) -> Iterator[str]:
    """Accuracies by the number of pictures from which the best was chosen."""
    if evaluation.ranker is None:
        return
    accuracies = evaluation.curve or evaluation.attributes
    curves = {ATTRIBUTES[name].title: accuracy.by_best_of for name, accuracy in accuracies.items()}
    for each in evaluation.things:
        if each.prompts == HELD_OUT_PAIRS:
            curves[f"right thing first of {each.among} ({each.judge})"] = each.best_of
    if (clip := evaluation.clip) is not None:
        curves[f"right caption first of {clip.candidates}"] = clip.by_best_of
    if not curves:
        return
    counts = sorted({count for curve in curves.values() for count in curve})
    yield heading("How much choosing helps")
    yield plot(
        {name: [(count, found.value) for count, found in curve.items()] for name, curve in curves.items()},
        across="pictures to choose the best from",
        up="share right",
        up_range=(0, 1),
        up_text="{:.0%}".format,
        logarithmic=True,
    )
    yield table(
        ("best of", *map(str, counts)),
        [(name, *(curve.get(count, "") for count in counts)) for name, curve in curves.items()],
    )


def sampling_table(evaluation: Evaluation) -> Iterator[str]:
    """Accuracies by sampling setting."""
    if not evaluation.grid:
        return
    names = list(next(iter(evaluation.grid.values())))
    yield heading("How codes are drawn")
    yield table(
        ("codes", *(ATTRIBUTES[name].title for name in names)),
        [(setting, *(Proportion.of(found[name]) for name in names)) for setting, found in evaluation.grid.items()],
    )
    if evaluation.caption_dropout is None:
        unknown = "the model folder does not say whether the model was trained with caption dropout"
        yield paragraph(f"Guidance is left out: {unknown}.")
    elif not evaluation.caption_dropout:
        yield paragraph("Guidance is left out: the model was trained without caption dropout.")


def attribute_pictures(evaluation: Evaluation) -> Iterator[str]:
    """The best pictures of the first questions of each attribute, right and wrong."""
    for name, accuracy in evaluation.attributes.items():
        yield heading(ATTRIBUTES[name].title)
        asked = accuracy.questions
        yield paragraph(f"{len(asked)} prompts about {num_subjects(asked)} different things or pairs.")
        for question, samples in islice(zip(asked, accuracy.samples, strict=True), SHOWN):
            best = samples.best_of[evaluation.settings.num_images]
            yield figure(best, question.prompt, question.is_right(best))


def caption_pictures(evaluation: Evaluation) -> Iterator[str]:
    """The best pictures of the first captions, each beside the nearest training picture."""
    clip = evaluation.clip
    if clip is None:
        return
    beside = ", each with the most similar training picture" if clip.neighbours else ""
    yield heading(f"Captions{beside}")
    for row, (caption, samples) in enumerate(islice(zip(clip.captions, clip.samples, strict=True), SHOWN)):
        yield figure(samples.best_of[evaluation.settings.num_images], caption)
        for neighbour in clip.neighbours[row : row + 1]:
            yield figure(open_drawing(neighbour.path), f"nearest, similarity {neighbour.similarity:.2f}")


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of plain text."""

    def row(cells: Sequence[object], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def figure(picture: Image.Image, caption: str, right: bool | None = None) -> str:
    """A picture with its caption below, marked right or wrong by colour and sign unless `right` is None."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    mark = "" if right is None else ' class="right"' if right else ' class="wrong"'
    source = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    text = html.escape(caption if right is None else f"{'✓' if right else '✗'} {caption}")
    return f'<figure><img{mark} src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'
