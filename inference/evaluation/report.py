"""An evaluation as a folder: report.html for people, report.json for programs, pictures.png to share."""

import base64
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from PIL import Image

from dalle_lean.draw.svg_plot import plot
from dalle_lean.io.files import read_text, write_bytes, write_json
from inference.evaluation.captions import open_drawing
from inference.evaluation.classification import HELD_OUT_PAIRS
from inference.evaluation.clip_metrics import Neighbour
from inference.evaluation.distribution_metrics import Distances
from inference.evaluation.evaluate import Evaluation
from inference.evaluation.questions import ATTRIBUTES, num_subjects
from inference.evaluation.stats import SIGNIFICANT, Proportion
from inference.gallery import png_bytes, tile_sheet, write_png

SHOWN = 12  # pictures shown of each attribute, and of the captions
ON_SHEET = 16
SHEET_TILE_SIDE = 160
SHEET_CAPTION_LINES = 3


def write_report(folder: Path, evaluation: Evaluation, title: str) -> None:
    """Write report.json, report.html, which needs no other file, and pictures.png of the first 16 captions, if any."""
    write_bytes(folder / "report.html", page(evaluation, title).encode())
    if (clip := evaluation.clip) is not None:
        pictures = [samples.best_of[evaluation.settings.num_images] for samples in clip.samples[:ON_SHEET]]
        sheet = tile_sheet(pictures, clip.captions[:ON_SHEET], SHEET_TILE_SIDE, SHEET_CAPTION_LINES)
        write_png(folder / "pictures.png", sheet, {})
    write_json(folder / "report.json", to_json(evaluation))


def page(evaluation: Evaluation, title: str) -> str:
    """The template report.html, filled in. Everything quoted is escaped, except for the plot."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["png"] = png_url
    template = environment.from_string(read_text(Path(__file__).with_name("report.html")))
    curves = ranking_curves(evaluation)
    return template.render(
        title=title,
        evaluation=evaluation,
        measures=measures(evaluation),
        curves=curves,
        plot=plot_curves(curves) if curves else "",
        attributes=ATTRIBUTES,
        num_subjects=num_subjects,
        open_drawing=open_drawing,
        proportion=Proportion.of,
        significant=SIGNIFICANT,
        shown=SHOWN,
    )


def png_url(picture: Image.Image) -> str:
    """A URL that holds the picture itself."""
    return "data:image/png;base64," + base64.b64encode(png_bytes(picture, {})).decode()


def ranking_curves(evaluation: Evaluation) -> dict[str, dict[int, Proportion]]:
    """Accuracies by the number of pictures from which the best was chosen; empty if nothing ranked them."""
    if evaluation.ranker is None:
        return {}
    accuracies = evaluation.curve or evaluation.attributes
    curves = {ATTRIBUTES[name].title: accuracy.by_best_of for name, accuracy in accuracies.items()}
    for each in evaluation.things:
        if each.prompts == HELD_OUT_PAIRS:
            curves[f"right thing first of {each.among} ({each.judge})"] = each.best_of
    if (clip := evaluation.clip) is not None:
        curves[f"right caption first of {clip.candidates}"] = clip.by_best_of
    return curves


def plot_curves(curves: dict[str, dict[int, Proportion]]) -> str:
    """An SVG."""
    return plot(
        {name: [(count, found.value) for count, found in curve.items()] for name, curve in curves.items()},
        across="pictures to choose the best from",
        up="share right",
        up_range=(0, 1),
        up_text="{:.0%}".format,
        logarithmic=True,
    )


def measures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """(measure, value) pairs of all figures."""
    most = evaluation.settings.num_images
    reconstruction, bits = evaluation.reconstruction, evaluation.bits
    found = [
        ("tokenizer, PSNR of held-out pictures", f"{reconstruction.psnr_db:.2f} dB"),
        ("tokenizer, SSIM", f"{reconstruction.ssim:.3f}"),
        ("tokenizer, codes in use", f"{reconstruction.codes_used:.1%}, perplexity {reconstruction.perplexity:.0f}"),
        ("held-out bits per image code", f"{bits.model:.3f}"),
        ("the same under another picture's caption", f"{bits.strangers_caption:.3f}"),
        ("the same without a caption", f"{bits.no_caption:.3f}"),
        ("count model of training pictures, codes alone", f"{bits.counts:.3f}"),
        ("count model, a table for each place", f"{bits.counts_by_place:.3f}"),
    ]
    if (kept := evaluation.kept_on_other_ground) is not None:
        found.append(("tokenizer, codes of things that stay on another ground", f"{kept:.0%}"))
    for name, accuracy in evaluation.attributes.items():
        found += [
            (f"{ATTRIBUTES[name].title}, best of {most}", str(accuracy.by_best_of[most])),
            ("the same judge on the real drawings", str(evaluation.on_drawings[name])),
            ("the commonest answer to all of them", str(accuracy.commonest_answer)),
        ]
    for each in evaluation.things:
        name = f"thing {each.prompts}: right first of {each.among}, best of {most}, says {each.judge}"
        drawings, reconstructions = each.on_drawings.value, each.on_reconstructions.value
        limits = f"{drawings:.0%} of the real drawings, {reconstructions:.0%} through the tokenizer"
        found.append((name, f"{each.best_of[most]}; {limits}"))
    if (clip := evaluation.clip) is not None:
        found += [
            (f"right caption first of {clip.candidates}, best of {most}", str(clip.by_best_of[most])),
            ("the same judge on the real drawings", str(clip.on_drawings)),
            *distance_rows("kernel distance", clip.distances),
        ]
        if clip.neighbours:
            found += [
                ("likeness to the nearest training picture, median", f"{median_similarity(clip.neighbours):.3f}"),
                ("the same of held-out drawings", f"{median_similarity(clip.drawings_neighbours):.3f}"),
            ]
    if evaluation.inception is not None:
        found += distance_rows("Frechet inception distance", evaluation.inception)
    return found


def median_similarity(neighbours: Sequence[Neighbour]) -> float:
    return median(neighbour.similarity for neighbour in neighbours)


def distance_rows(name: str, distances: Distances) -> list[tuple[str, str]]:
    """The distance of the drawn pictures, then those to compare it with."""
    count = distances.pictures
    return [
        (f"{name} of {count['drawn']} pictures to {count['real']} held-out drawings", f"{distances.drawn:.4g}"),
        (f"the same of the tokenizer's reconstructions ({count['floor']})", f"{distances.floor:.4g}"),
        (f"the same of training pictures ({count['trained']})", f"{distances.trained:.4g}"),
    ]


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    clip = evaluation.clip
    content = {
        "model_sha256": evaluation.model_sha256,
        "best_of": evaluation.settings.num_images,
        "settings": evaluation.settings,
        "sizes": evaluation.config,
        "ranker": evaluation.ranker,
        "caption_dropout": evaluation.caption_dropout,
        "tokenizer": evaluation.reconstruction,
        "codes_kept_on_other_ground": evaluation.kept_on_other_ground,
        "bits_per_code": evaluation.bits,
        "attributes": {
            name: {
                "best_of": accuracy.by_best_of,
                "on_drawings": evaluation.on_drawings[name],
                "commonest_answer": accuracy.commonest_answer,
                "different_subjects": num_subjects(accuracy.questions),
            }
            for name, accuracy in evaluation.attributes.items()
        },
        "curve": {name: accuracy.by_best_of for name, accuracy in evaluation.curve.items()},
        "right_thing_first": evaluation.things,
        "judged": clip
        and {
            "judge": clip.judge,
            "right_caption_first": {
                "among": clip.candidates,
                "best_of": clip.by_best_of,
                "on_drawings": clip.on_drawings,
            },
            "kernel_distance": clip.distances,
            "nearest_training_picture": {"drawn": clip.neighbours, "held_out_drawings": clip.drawings_neighbours},
        },
        "frechet_inception_distance": evaluation.inception,
        "claims": evaluation.comparisons,
        "grid": [
            {**setting._asdict(), **{name: Proportion.of(hits) for name, hits in found.items()}}
            for setting, found in evaluation.grid.items()
        ],
    }
    return {name: plain(value) for name, value in content.items()}


def plain(value: Any) -> Any:
    """A value for JSON, with dataclasses as objects."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
