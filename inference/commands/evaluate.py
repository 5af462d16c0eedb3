"""`dalle-lean evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import Device, progress_bar, say


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model folder or hub id. Default: the bundled model."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.json.")] = Path("report"),
    data: Annotated[Path, typer.Option(help="Folder with train/ and heldout/, as `make data` writes it.")] = Path(
        "data/emoji"
    ),
    best_of: Annotated[
        str, typer.Option(help="Numbers of pictures to choose the best from; the last is the one that is told.")
    ] = "1,4,16",
    curve: Annotated[
        str, typer.Option(help="The best of so many is compared for a few questions; the last is the paper's.")
    ] = "1,4,16,64,128",
    curve_questions: Annotated[
        int, typer.Option(help="So many prompts of each attribute for the curve; 0: none.")
    ] = 10,
    questions: Annotated[int, typer.Option(help="Prompts of each attribute: ground, paint, size, side.")] = 60,
    captions: Annotated[int, typer.Option(help="Held-out captions to draw and to tell apart.")] = 100,
    pictures: Annotated[int, typer.Option(help="Held-out pictures for the tokenizer, the bits, the distances.")] = 512,
    grid: Annotated[
        int,
        typer.Option(
            help="So many prompts of each attribute for each top-k, top-p, temperature and guidance; 0: none."
        ),
    ] = 20,
    nearest_among: Annotated[
        int, typer.Option(help="Training pictures among which those nearest to what was drawn are looked for; 0: none.")
    ] = 100_000,
    judge: Annotated[
        str | None,
        typer.Option(help="CLIP that judges captions: a CLIP folder, or as --scorer. Default: the one that ranks."),
    ] = None,
    classifier: Annotated[
        Path | None, typer.Option(help="OUT/classifier of train-things. Default: which thing is drawn is not judged.")
    ] = None,
    scorer: Annotated[str, typer.Option(help="What ranks the pictures, as for generate, or a CLIP folder.")] = "clip",
    inception: Annotated[
        Path | None,
        typer.Option(help="File pt_inception-2015-12-05-6726825d.pth, for the Frechet inception distance."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts that are chosen and of the pictures.", min=0)] = 0,
    batch_size: Annotated[int | None, typer.Option(help="Pictures drawn at once. Default: by the free memory.")] = None,
    device: Device = "auto",
) -> None:
    """Measure MODEL on held-out pictures and on prompts that training never saw; OUT gets a page and a JSON file."""
    from dalle_lean.images.thing_classifier import ThingClassifier
    from inference.evaluation.clip_metrics import make_judge
    from inference.evaluation.evaluate import evaluate as run
    from inference.evaluation.inception import Inception
    from inference.evaluation.report import rows, write_report
    from inference.evaluation.results import Sizes
    from inference.generator import Generator

    sizes = Sizes(
        best_of=parse_counts("best_of", best_of),
        curve=parse_counts("curve", curve),
        curve_questions=curve_questions,
        questions=questions,
        captions=captions,
        pictures=pictures,
        grid_questions=grid,
        nearest_among=nearest_among,
    )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder")
    generator = Generator.from_folder(model, device, scorer=scorer)
    judging = None if judge is None else make_judge(judge, generator.device)
    classifying = None if classifier is None else ThingClassifier.load(classifier, generator.device)
    network = None if inception is None else Inception(inception, generator.device)
    with progress_bar("evaluating", "items") as on_progress:
        found = run(
            generator,
            data,
            sizes,
            seed=seed,
            judge=judging,
            classifier=classifying,
            inception=network,
            batch_size=batch_size,
            on_progress=on_progress,
        )
    write_report(out, found, f"Evaluation of {model or 'the bundled model'}")
    for name, value in rows(found):
        say(f"{name}: {value}")
    for claim in found.claims:
        say(str(claim))
    say(f"the report is {out / 'report.html'}")


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """ "1,4,16" -> (1, 4, 16)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{name}={text!r}: must be numbers with commas between, as 1,4,16") from None
