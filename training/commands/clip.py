"""The command `dalle-lean train-clip`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.terminal import Device, StoredDtype, progress_bar, say


def train_clip(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Folder of pictures with a metadata.jsonl: file_name and text.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the run; the same command continues what it holds.")
    ],
    heldout: Annotated[
        Path | None,
        typer.Option(help="Folder to measure on; without it one caption in twenty is left out of the training."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; without it one is made from the captions.")
    ] = None,
    vqgan: Annotated[
        Path | None, typer.Option(help="VQGAN folder: half of the pictures are shown as it decodes them.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all; 2500 unless told.", min=1)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Pictures in a step, no caption twice; 128 unless told.", min=2)
    ] = None,
    hard_negative_share: Annotated[
        float | None,
        typer.Option(
            help="Of a batch, groups of pictures that are alike but for one thing; 0.5 unless told.", min=0, max=1
        ),
    ] = None,
    hard_group_size: Annotated[int | None, typer.Option(help="Pictures in such a group; 8 unless told.", min=2)] = None,
    alike: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELDS",
            help="Fields of metadata.jsonl, with commas between, that agree within a group while others differ; once "
            "for each kind of groups. kind,ground,paint,size,place and things unless told.",
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 1e-3 unless told.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first weights and the order of the data; 0 unless told.", min=0)
    ] = None,
    picture_side: Annotated[
        int | None, typer.Option(help="Pixels of a side, to which pictures are resized; 128 unless told.")
    ] = None,
    image_width: Annotated[
        int | None, typer.Option(help="Channels of the image tower at its first resolution; 48 unless told.", min=4)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Of text tower and features, a multiple of 32; 192 unless told.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 (autocast); bf16 unless told.")] = None,
    save_dtype: Annotated[StoredDtype, typer.Option(help="Type of the stored weights.")] = StoredDtype.FLOAT32,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop saved after so many minutes in all; the same command goes on.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a small CLIP on pictures with captions; OUT/clip is what ranks the pictures of a model."""
    import torch

    from dalle_lean.devices import pick_device
    from training.run.folder import run_folder
    from training.tokenizers.clip import ClipRecipe
    from training.tokenizers.clip import train_clip as run

    chosen: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        "hard_negative_share": hard_negative_share,
        "hard_group_size": hard_group_size,
        "alike": tuple(tuple(name.strip() for name in fields.split(",")) for fields in alike) if alike else None,
        "lr": lr,
        "seed": seed,
        "picture_side": picture_side,
        "image_width": image_width,
        "width": width,
        "precision": precision,
    }
    recipe = ClipRecipe(**{name: value for name, value in chosen.items() if value is not None})
    with run_folder(out), progress_bar("training CLIP", "pictures") as on_progress:
        end = run(
            data,
            out,
            recipe,
            heldout=heldout,
            tokenizer=tokenizer,
            vqgan=vqgan,
            save_dtype=getattr(torch, save_dtype),
            device=str(pick_device(device)),
            max_minutes=max_minutes,
            on_progress=on_progress,
            on_notice=say,
        )
    say(end.end(recipe.steps, f"the CLIP is in {out / 'clip'}"))
