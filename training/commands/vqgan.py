"""The command `dalle-lean train-vqgan`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import Device, StoredDtype, progress_bar, say
from training.commands.options import LearningRate, MaxMinutes, Out, Precision, Seed, Steps
from training.vqgan.recipe import EMOJI, VQGANRecipe


class Quantizer(StrEnum):
    """How codes are chosen."""

    VQ = "vq"
    GUMBEL = "gumbel"


def shape_option(name: str, text: str, *, least: int | None = None) -> Any:
    """An option of the VQGAN's shape, whose default --init-from changes."""
    value = EMOJI[name]
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return typer.Option(help=f"{text} [default: {default}, or that of --init-from]", show_default=False, min=least)


def train_vqgan(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of pictures, subfolders included.")],
    out: Out,
    heldout: Annotated[
        Path | None, typer.Option(help="Folder to measure on; without it every 50th picture is kept for that.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="VQGAN folder whose shape and weights to start from, as for larger pictures.")
    ] = None,
    steps: Steps = VQGANRecipe.steps,
    batch_size: Annotated[int, typer.Option(help="Pictures in a step.", min=1)] = VQGANRecipe.batch_size,
    lr: LearningRate = VQGANRecipe.lr,
    seed: Seed = VQGANRecipe.seed,
    picture_side: Annotated[
        int | None, shape_option("picture_side", "Pixels per side to which pictures are resized.")
    ] = None,
    quantizer: Annotated[
        Quantizer | None, shape_option("quantizer", "vq: the nearest code; gumbel: the code with the highest score.")
    ] = None,
    codebook_size: Annotated[int | None, shape_option("codebook_size", "Number of codes.", least=1)] = None,
    code_width: Annotated[int | None, shape_option("code_width", "Numbers in a code's vector.", least=1)] = None,
    z_channels: Annotated[int | None, shape_option("z_channels", "Channels of the encoder's output.", least=1)] = None,
    channels: Annotated[int | None, shape_option("channels", "Channels at full resolution; a multiple of 32.")] = None,
    channel_multipliers: Annotated[
        str | None,
        shape_option("channel_multipliers", "One for each resolution; each after the first halves the picture."),
    ] = None,
    num_res_blocks: Annotated[
        int | None, shape_option("num_res_blocks", "Residual blocks at each resolution.", least=1)
    ] = None,
    encoder_window: Annotated[
        int | None,
        typer.Option(
            help="Pixels per side that decide a code: what looks the same has the same code on any ground. "
            "[default: the whole picture, or that of --init-from]",
            show_default=False,
        ),
    ] = None,
    discriminator_start: Annotated[
        float, typer.Option(help="Share of the steps before the discriminator joins; 1 leaves it out.")
    ] = VQGANRecipe.discriminator_start,
    discriminator_weight: Annotated[
        float, typer.Option(help="Adversarial gradient norm, as a fraction of the reconstruction's.")
    ] = VQGANRecipe.discriminator_weight,
    crop_from: Annotated[
        int | None, typer.Option(help="Read pictures at this side and learn from crops of --picture-side pixels.")
    ] = VQGANRecipe.crop_from,
    decoder_only: Annotated[
        bool, typer.Option(help="Train the decoder of --init-from alone: shards made with it stay valid.")
    ] = VQGANRecipe.decoder_only,
    flip: Annotated[
        bool, typer.Option(help="Mirror half of the pictures; not where left and right matter.")
    ] = VQGANRecipe.flip,
    precision: Precision = VQGANRecipe.precision,
    save_dtype: Annotated[StoredDtype, typer.Option(help="Type of the stored weights.")] = StoredDtype.FLOAT32,
    max_minutes: MaxMinutes = None,
    device: Device = "auto",
) -> None:
    """Train a small VQGAN; OUT becomes the folder that `preprocess --vqgan` takes."""
    import dataclasses

    import torch

    from dalle_lean.devices import pick_device
    from dalle_lean.images.vqgan import VQGAN, VQGANConfig
    from training.run.folder import run_folder
    from training.vqgan.run import train_vqgan as run

    shape: dict[str, Any] = {
        "picture_side": picture_side,
        "quantizer": quantizer and quantizer.value,
        "codebook_size": codebook_size,
        "code_width": code_width,
        "z_channels": z_channels,
        "channels": channels,
        "channel_multipliers": channel_multipliers and parse_multipliers(channel_multipliers),
        "num_res_blocks": num_res_blocks,
        "encoder_window": encoder_window,
    }
    if decoder_only and init_from is None:
        raise UserError("--decoder-only needs the VQGAN whose decoder to train: --init-from FOLDER")
    first = None if init_from is None else VQGAN.load(init_from)
    config = VQGANConfig(**EMOJI) if first is None else first.config
    recipe = VQGANRecipe(
        config=dataclasses.replace(config, **{name: value for name, value in shape.items() if value is not None}),
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        discriminator_start=discriminator_start,
        discriminator_weight=discriminator_weight,
        crop_from=crop_from,
        decoder_only=decoder_only,
        flip=flip,
        precision=precision,
    )
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
        )
    say(end.end(recipe.steps, f"the VQGAN is in {out}"))


def parse_multipliers(text: str) -> tuple[int, ...]:
    """ "1,1,2,4" -> (1, 1, 2, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"channel_multipliers={text!r}: must be numbers with commas between, as 1,1,2,4") from None
