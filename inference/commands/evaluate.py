"""`dalle-lean evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import BatchSize, Device, echo, progress_bar


def evaluate(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Model folder or hub id. [default: the bundled model]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.json.")] = Path("report"),
    data: Annotated[Path, typer.Option(help="Folder of `make data`, with train/ and heldout/.")] = Path("data/emoji"),
    best_of: Annotated[str, typer.Option(help="Numbers of pictures to choose the best from.")] = "1,4,16",
    curve: Annotated[str, typer.Option(help="The same for the curve, with fewer prompts.")] = "1,4,16,64,128",
    curve_questions: Annotated[int, typer.Option(help="Prompts per attribute for the curve; 0 is off.")] = 10,
    questions: Annotated[int, typer.Option(help="Prompts per attribute, such as ground or size.")] = 60,
    captions: Annotated[int, typer.Option(help="Held-out captions to draw and to tell apart.")] = 100,
    pictures: Annotated[int, typer.Option(help="Held-out pictures for the tokenizer, the bits, the distances.")] = 512,
    grid: Annotated[int, typer.Option(help="Prompts per attribute for each sampling setting; 0 is off.")] = 20,
    nearest_among: Annotated[int, typer.Option(help="Training pictures searched for copies; 0 is off.")] = 100_000,
    judge: Annotated[
        str | None,
        typer.Option(help="CLIP that judges captions: a folder, or as in --scorer. [default: the one that ranks]"),
    ] = None,
    classifier: Annotated[
        list[Path] | None,
        typer.Option(help="OUT/classifier of train-things, to judge the things; repeatable. [default: none]"),
    ] = None,
    scorer: Annotated[str, typer.Option(help="What ranks the pictures: as in generate, or a CLIP folder.")] = "clip",
    inception: Annotated[
        Path | None,
        typer.Option(help="pt_inception-2015-12-05-6726825d.pth, for the Frechet distance. [default: none]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the prompts and their pictures.", min=0)] = 0,
    batch_size: BatchSize = None,
    device: Device = "auto",
) -> None:
    """Measure MODEL on held-out pictures and on prompts that training never saw; OUT gets report.html and .json."""
    from dalle_lean.devices import pick_device
    from dalle_lean.images.thing_classifier import ThingClassifier
    from dalle_lean.io.files import check_output_folder
    from inference.evaluation.clip_metrics import make_judge
    from inference.evaluation.distribution_metrics import Inception
    from inference.evaluation.eval_data import EvalConfig
    from inference.evaluation.evaluate import evaluate as run
    from inference.evaluation.report import measures, write_report
    from inference.generator import Generator

    config = EvalConfig(
        best_of=parse_counts("best_of", best_of),
        curve=parse_counts("curve", curve),
        curve_questions=curve_questions,
        questions=questions,
        captions=captions,
        pictures=pictures,
        grid_questions=grid,
        nearest_among=nearest_among,
    )
    check_output_folder(out)
    names = [short_name(folder) for folder in classifier or ()]
    if len({*names}) < len(names):
        raise UserError(f"--classifier: their runs are called {', '.join(names)}; must be different names")
    where = pick_device(device)
    # On all CPUs the same, so that figures can be compared.
    generator = Generator.from_folder(model, where, "fp32" if where.type == "cpu" else None, scorer)
    clip = None if judge is None else make_judge(judge, generator.device)
    classifiers = {short_name(folder): ThingClassifier.load(folder, generator.device) for folder in classifier or ()}
    network = None if inception is None else Inception(inception, generator.device)
    with progress_bar("evaluating", "items") as on_progress:
        found = run(
            generator,
            data,
            config,
            seed=seed,
            judge=clip,
            classifiers=classifiers,
            inception=network,
            batch_size=batch_size,
            on_progress=on_progress,
        )
    write_report(out, found, f"Evaluation of {model or 'the bundled model'}")
    for name, value in measures(found):
        echo(f"{name}: {value}")
    for comparison in found.comparisons:
        echo(str(comparison))
    echo(f"the report is {out / 'report.html'}")


def short_name(classifier: Path) -> str:
    """The name of the run that trained it: runs/judge/classifier -> judge."""
    return classifier.parent.name if classifier.name == "classifier" and classifier.parent.name else classifier.name


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """ "1,4,16" -> (1, 4, 16)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{name}={text!r}: must be numbers separated by commas, such as 1,4,16") from None
