"""The command `dalle-lean train-vqgan`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import Device, StoredDtype, progress_bar, say


class Quantizer(StrEnum):
    """How codes are chosen."""

    VQ = "vq"
    GUMBEL = "gumbel"


def train_vqgan(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of pictures, subfolders included.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the run; the same command continues what it holds.")
    ],
    heldout: Annotated[
        Path | None, typer.Option(help="Folder to measure on; without it every 50th picture is kept for that.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="VQGAN folder whose shape and weights to begin with, as for larger pictures.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pictures in a step.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the first weights and the order of the data.", min=0)] = None,
    picture_side: Annotated[int | None, typer.Option(help="Pixels of a side, to which pictures are resized.")] = None,
    quantizer: Annotated[Quantizer | None, typer.Option(help="vq: the nearest code; gumbel: scored codes.")] = None,
    codebook_size: Annotated[int | None, typer.Option(help="Number of codes.", min=1)] = None,
    code_width: Annotated[int | None, typer.Option(help="Numbers in a code's vector.", min=1)] = None,
    z_channels: Annotated[int | None, typer.Option(help="Channels the encoder ends with.", min=1)] = None,
    channels: Annotated[int | None, typer.Option(help="At full resolution; a multiple of 32.")] = None,
    channel_multipliers: Annotated[
        str | None, typer.Option(help="One for each resolution, as 1,1,2,4; each after the first halves the picture.")
    ] = None,
    num_res_blocks: Annotated[int | None, typer.Option(help="At each resolution.", min=1)] = None,
    discriminator_start: Annotated[
        float | None, typer.Option(help="Share of the steps before the discriminator joins; 1 leaves it out.")
    ] = None,
    discriminator_weight: Annotated[
        float | None, typer.Option(help="Its say on the pixels, as a share of the reconstruction's.")
    ] = None,
    crop_from: Annotated[
        int | None, typer.Option(help="Read pictures at this side and learn from crops of --picture-side pixels.")
    ] = None,
    flip: Annotated[bool, typer.Option(help="Mirror half of the pictures; not where left and right matter.")] = False,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 (autocast).")] = None,
    save_dtype: Annotated[StoredDtype, typer.Option(help="Type of the stored weights.")] = StoredDtype.FLOAT32,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop saved after so many minutes in all; the same command goes on.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a small VQGAN; OUT becomes the folder that `preprocess --vqgan` takes. Options not given: the recipe's."""
    import dataclasses

    import torch

    from dalle_lean.devices import pick_device
    from dalle_lean.images.vqgan import VQGAN
    from training.run.folder import run_folder
    from training.tokenizers.vqgan import train_vqgan as run
    from training.tokenizers.vqgan_learner import VQGANRecipe

    shape: dict[str, Any] = {
        "picture_side": picture_side,
        "quantizer": quantizer and quantizer.value,
        "codebook_size": codebook_size,
        "code_width": code_width,
        "z_channels": z_channels,
        "channels": channels,
        "channel_multipliers": channel_multipliers and parse_multipliers(channel_multipliers),
        "num_res_blocks": num_res_blocks,
    }
    chosen: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "seed": seed,
        "discriminator_start": discriminator_start,
        "discriminator_weight": discriminator_weight,
        "crop_from": crop_from,
        "flip": flip,
        "precision": precision,
    }
    recipe = VQGANRecipe()
    first = None if init_from is None else VQGAN.load(init_from)
    config = recipe.config if first is None else first.config
    config = dataclasses.replace(config, **{name: value for name, value in shape.items() if value is not None})
    given = {name: value for name, value in chosen.items() if value is not None}
    recipe = dataclasses.replace(recipe, config=config, **given)
    with run_folder(out), progress_bar("training VQGAN", "pictures") as on_progress:
        end = run(
            data,
            out,
            recipe,
            heldout=heldout,
            init_from=first,
            save_dtype=getattr(torch, save_dtype),
            device=str(pick_device(device)),
            max_minutes=max_minutes,
            on_progress=on_progress,
            on_notice=say,
        )
    say(end.end(recipe.steps, f"the VQGAN is in {out}"))


def parse_multipliers(text: str) -> tuple[int, ...]:
    """ "1,1,2,4" -> (1, 1, 2, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"channel_multipliers={text!r}: must be numbers with commas between, as 1,1,2,4") from None
