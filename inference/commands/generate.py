"""`dalle-lean generate`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import BatchSize, Device, echo, notice, progress_bar, warn
from dalle_lean.words import counted, shortened, utf8

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from inference.generator import Generator
    from inference.request import Picture


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="What to draw; several get a folder each.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures, contact_sheet.png and results.json.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hub id. [default: $DALLE_LEAN_MODEL, else the bundled model]"),
    ] = None,
    num_images: Annotated[int, typer.Option(help="Pictures drawn for each prompt.")] = 128,
    best: Annotated[
        int | None,
        typer.Option(help="How many to keep, by their score. [default: 4, or all where fewer are drawn]"),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Draw each code from the k most likely ones; 0 is off.")] = 256,
    top_p: Annotated[
        float, typer.Option(help="Draw each code from the most likely ones that make up this probability; 1 is off.")
    ] = 0.75,
    temperature: Annotated[float, typer.Option(help="Above 1 wilder, below 1 tamer; 0 takes the likeliest.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same pictures, with any batch size.")] = 0,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="Above 1 follows the prompt more closely; needs a model trained with caption dropout. 1 is off. "
            "[default: the model's]",
        ),
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A picture whose upper rows are kept; the rest is drawn.")] = None,
    start_rows: Annotated[
        int | None, typer.Option(help="Rows of codes kept of --start. [default: the upper half]", min=1)
    ] = None,
    scorer: Annotated[
        str,
        typer.Option(
            help="What ranks the pictures: clip (the model's own), none, ARCHITECTURE:FILE, ARCHITECTURE:TAG, "
            "hf-hub:OWNER/NAME, or your own class, MODULE:CLASS."
        ),
    ] = "clip",
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16 (GPU) or int8 (CPU). [default: the faster of fp32 and bf16]"),
    ] = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
) -> None:
    """Draw pictures of each PROMPT and keep the best few."""
    from dalle_lean.io.files import check_output_folder
    from dalle_lean.vocabulary import did_you_mean, enumerated, named
    from inference.request import Request, Settings, check_prompt, tidy

    prompts = [tidy(utf8(prompt)) for prompt in prompts]
    for prompt in prompts:
        check_prompt(prompt)
    settings = Settings(
        num_images=num_images,
        best=best,
        top_k=top_k,
        top_p=top_p,
        temperature=temperature,
        seed=seed,
        guidance=1.0 if guidance is None else guidance,
    )
    if start_rows is not None and start is None:
        raise UserError(f"start_rows={start_rows}: name the picture whose rows to keep with --start")
    check_output_folder(out)
    picture = None if start is None else open_start(start)
    echo("loading the model ...")
    from inference.gallery import other_galleries, pictures_of, prompt_folder, write_gallery
    from inference.generator import Generator

    for index in range(len(prompts)):
        pictures_of(prompt_folder(out, prompts, index))  # fail here, not after drawing
    generator = Generator.from_folder(model, device, precision, scorer)  # type: ignore[arg-type]
    if guidance is None:
        settings = replace(settings, guidance=generator.guidance)
    if generator.scorer is None and scorer != "none" and (count := generator.num_drawn(settings)) < num_images:
        notice(
            f"this model has no CLIP to rank {num_images} candidates, so only {count} are drawn; `pack --clip` adds one"
        )
    codes = None if start is None or picture is None else upper_rows(generator, start, picture, start_rows)
    out.mkdir(parents=True, exist_ok=True)
    if len(prompts) > 1 and not any(" " in prompt for prompt in prompts):
        notice(f"drawing {len(prompts)} prompts of a word each; a prompt of several words needs quotes")
    for prompt in prompts:
        about = f"{shortened(prompt, 40)!r}: " if len(prompts) > 1 else ""
        if unread := generator.unread(prompt):
            warn(f"{about}the prompt is too long; I do not read {shortened(unread)!r}")
        if (plain := generator.plain(prompt)) != prompt:
            notice(f"{about}I read this as {shortened(plain)!r}")
        if unknown := generator.unknown_words(prompt):
            meant = did_you_mean(generator.suggestions(prompt), unknown)
            notice(f"{about}I have not learnt to draw: {enumerated(named(unknown))}{'; ' * bool(meant)}{meant}")
    name = repr(shortened(prompts[0], 40)) if len(prompts) == 1 else f"{len(prompts)} prompts"
    written = {}
    try:
        with progress_bar(f"drawing {name}", "codes") as on_progress:
            for progress in generator.draw([Request(prompt, settings, codes) for prompt in prompts], batch_size):
                on_progress(progress.done, progress.total, progress.note)
                if progress.pictures is not None:
                    index = progress.request
                    prompt, folder = prompts[index], prompt_folder(out, prompts, index)
                    facts = generator.describe(settings, codes)
                    write_gallery(folder, prompt, progress.pictures, facts, generator.unknown_words(prompt))
                    number = counted(len(progress.pictures), "picture")
                    written[index] = f"{folder}: {number} of {shortened(prompt)!r}{remark_on(progress.pictures)}"
    finally:  # Ctrl+C too leaves finished prompts
        for index in sorted(written):
            echo(written[index])
    if others := other_galleries(out, prompts):
        notice(f"{out} also holds the pictures of {counted(len(others), 'earlier prompt')}")


def remark_on(pictures: "list[Picture]") -> str:
    """What to say of pictures in which nothing is drawn, or nothing differs."""
    from inference.ranking import all_alike, all_blank

    if all_blank(pictures):
        return ", all of one colour: the model draws nothing for these words; try fewer or others"
    return ", all alike: other words make others" if all_alike(pictures) else ""


def open_start(path: Path) -> "Image":
    """Open the picture that --start names; ValueError for none."""
    from dalle_lean.images.files import FORMATS, UnusablePicture, open_picture_file

    if not path.exists():
        raise UserError(f"--start: there is no file {path}")
    if path.is_dir():
        raise UserError(f"--start: {path} is a folder; name a picture")
    try:
        return open_picture_file(path)
    except UnusablePicture as error:
        if error.reason == "picture_broken":
            raise UserError(f"--start: {path} is not a picture that can be read ({', '.join(FORMATS)})") from None
        raise UserError(f"--start: {path}: {error.sentence}") from None


def upper_rows(generator: "Generator", path: Path, picture: "Image", rows: int | None) -> "Tensor":
    """Codes of the upper rows of a picture's centre square; ValueError for too many rows or a damaged picture."""
    from dalle_lean.images.files import UnusablePicture

    side = generator.model.config.image_side
    rows = side // 2 if rows is None else rows
    if side == 1:
        raise UserError("--start: this model draws a single row, so none can be kept; leave it out")
    if not 1 <= rows < side:
        raise UserError(f"start_rows={rows}: this model draws {side} rows; keep 1 to {side - 1}")
    try:
        return generator.read_picture(picture)[: rows * side]
    except UnusablePicture as error:
        raise UserError(f"{path}: {error.sentence}") from None
