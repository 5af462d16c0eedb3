"""`dalle-lean generate`."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.terminal import Device, progress_bar, say, warn


def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="What to draw; several prompts get one folder each.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the pictures, contact_sheet.png and results.json.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id. Default: $DALLE_LEAN_MODEL, else the bundled model.")
    ] = None,
    num_images: Annotated[int, typer.Option(help="Pictures drawn for each prompt.")] = 128,
    best: Annotated[
        int | None,
        typer.Option(help="How many to keep, by CLIP score. Default: 4, or all where fewer are drawn."),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Draw each code from the k most likely ones; 0 is off.")] = 256,
    top_p: Annotated[float, typer.Option(help="Draw each code from the likeliest with this mass; 1 is off.")] = 0.75,
    temperature: Annotated[
        float, typer.Option(help="Above 1 wilder, below 1 tamer; 0 takes the likeliest code.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Picture i of a seed is the same for any batch size.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(help="Pictures drawn at once. Default: by the model's size.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Draw pictures of each PROMPT and keep the best few."""
    from inference.gallery import prompt_folder, write_gallery
    from inference.generator import Generator, Settings, check_prompt, describe

    for prompt in prompts:
        check_prompt(prompt)
    settings = Settings(num_images=num_images, best=best, top_k=top_k, top_p=top_p, temperature=temperature, seed=seed)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out needs a folder")
    say("loading the model ...")
    generator = Generator.from_folder(model, device=device)
    out.mkdir(parents=True, exist_ok=True)
    for index, prompt in enumerate(prompts):
        if excess := generator.excess_tokens(prompt):
            warn(f"the last {excess} tokens of the prompt do not fit this model and are not read: {prompt!r}")
        with progress_bar(f"drawing {prompt[:40]!r}", "codes") as on_progress:
            pictures = generator.run(prompt, settings, batch_size, on_progress)
        folder = prompt_folder(out, prompts, index)
        write_gallery(folder, prompt, pictures, describe(generator, settings))
        say(f"{len(pictures)} pictures of {prompt!r} are in {folder}")
