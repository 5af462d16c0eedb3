"""The command `dalle-lean train-clip`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.terminal import Device, StoredDtype
from training.clip.recipe import ClipRecipe
from training.commands.options import (
    LearningRate,
    MaxMinutes,
    Out,
    Precision,
    Seed,
    Steps,
    TokenizerFile,
    recipe_of,
    train_run,
)

ALIKE = [",".join(fields) for fields in ClipRecipe.alike]


def train_clip(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Folder of pictures with a metadata.jsonl: file_name and text.")
    ],
    out: Out,
    heldout: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder to measure on. [default: {ClipRecipe.heldout_share:.0%} of the captions, not trained on]",
            show_default=False,
        ),
    ] = None,
    tokenizer: TokenizerFile = None,
    vqgan: Annotated[
        Path | None,
        typer.Option(help=f"VQGAN folder, to encode and decode {ClipRecipe.decoded_share:.0%} of the pictures."),
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="CLIP folder with the initial weights and the tokenizer, in place of new ones.")
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="Store the mean of the initial and the trained weights; needs --init.")
    ] = False,
    steps: Steps = ClipRecipe.steps,
    batch_size: Annotated[
        int, typer.Option(help="Pictures per step, no caption twice.", min=2)
    ] = ClipRecipe.batch_size,
    hard_negative_share: Annotated[
        float, typer.Option(help="Largest share of a batch in groups of similar pictures, below 1.", min=0)
    ] = ClipRecipe.hard_negative_share,
    hard_group_size: Annotated[int, typer.Option(help="Pictures in a group.", min=2)] = ClipRecipe.hard_group_size,
    alike: Annotated[
        list[str],
        typer.Option(
            metavar="FIELDS",
            help="Comma-separated fields of metadata.jsonl that agree within a group while others differ; repeatable, "
            "for several kinds of groups.",
        ),
    ] = ALIKE,
    extra_captions: Annotated[
        int, typer.Option(help="Captions per step beside those of its pictures, as negatives.", min=0)
    ] = ClipRecipe.extra_captions,
    lr: LearningRate = ClipRecipe.lr,
    seed: Seed = ClipRecipe.seed,
    picture_side: Annotated[
        int, typer.Option(help="Side in pixels to which pictures are resized.")
    ] = ClipRecipe.picture_side,
    image_width: Annotated[
        int, typer.Option(help="Channels of the image tower at its first resolution.", min=4)
    ] = ClipRecipe.image_width,
    width: Annotated[int, typer.Option(help="Width of text tower and features, a multiple of 32.")] = ClipRecipe.width,
    precision: Precision = ClipRecipe.precision,
    save_dtype: Annotated[StoredDtype, typer.Option(help="Type of the stored weights.")] = "float32",
    max_minutes: MaxMinutes = None,
    device: Device = "auto",
) -> None:
    """Train a small CLIP on captioned pictures; OUT/clip ranks a model's pictures."""
    options = locals()
    import torch

    from dalle_lean.tokenizer import find_tokenizer
    from training.clip.run import ClipRun

    fields = tuple(tuple(name.strip() for name in group.split(",")) for group in alike)
    recipe = recipe_of(ClipRecipe, options, alike=fields)
    inputs: dict[str, Any] = {"heldout": heldout, "tokenizer": find_tokenizer(tokenizer), "vqgan": vqgan, "init": init}
    inputs |= {"average": average, "save_dtype": getattr(torch, save_dtype)}
    train_run(ClipRun, data, out, recipe, "CLIP", device, max_minutes, **inputs)
