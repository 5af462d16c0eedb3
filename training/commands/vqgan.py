"""The command `dalle-lean train-vqgan`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import Device, StoredDtype
from training.commands.options import LearningRate, MaxMinutes, Out, Precision, Seed, Steps, recipe_of, train_run
from training.vqgan.recipe import EMOJI, VQGANRecipe


def shape_option(name: str, text: str, *, least: int | None = None) -> Any:
    """An option of the VQGAN's shape, whose default is EMOJI's or that of --init-from."""
    value = EMOJI[name]
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return typer.Option(help=f"{text} [default: {default}, or that of --init-from]", show_default=False, min=least)


def train_vqgan(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of pictures, subfolders included.")],
    out: Out,
    heldout: Annotated[
        Path | None,
        typer.Option(
            help="Folder to measure on. [default: every 50th picture, which is not trained on]", show_default=False
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="VQGAN folder with the initial shape and weights, e.g. to train on larger pictures."),
    ] = None,
    steps: Steps = VQGANRecipe.steps,
    batch_size: Annotated[int, typer.Option(help="Pictures per step.", min=1)] = VQGANRecipe.batch_size,
    lr: LearningRate = VQGANRecipe.lr,
    seed: Seed = VQGANRecipe.seed,
    picture_side: Annotated[
        int | None, shape_option("picture_side", "Side in pixels to which pictures are resized.")
    ] = None,
    quantizer: Annotated[
        Literal["vq", "gumbel"] | None,
        shape_option("quantizer", "vq: the nearest code; gumbel: the code with the highest score."),
    ] = None,
    codebook_size: Annotated[int | None, shape_option("codebook_size", "Number of codes.", least=1)] = None,
    code_width: Annotated[int | None, shape_option("code_width", "Dimension of the code vectors.", least=1)] = None,
    z_channels: Annotated[int | None, shape_option("z_channels", "Channels of the encoder's output.", least=1)] = None,
    channels: Annotated[int | None, shape_option("channels", "Channels at full resolution; a multiple of 32.")] = None,
    channel_multipliers: Annotated[
        str | None,
        shape_option(
            "channel_multipliers", "One per resolution, such as 1,1,2,4; each after the first halves the picture."
        ),
    ] = None,
    num_res_blocks: Annotated[
        int | None, shape_option("num_res_blocks", "Residual blocks at each resolution.", least=1)
    ] = None,
    encoder_window: Annotated[
        int | None,
        typer.Option(
            help="Side in pixels of the patch that determines a code, so that equal patches have equal codes on any "
            "background. [default: the whole picture, or that of --init-from]",
            show_default=False,
        ),
    ] = None,
    squared_weight: Annotated[
        float, typer.Option(help="Weight of the mean squared error beside the mean absolute error; for PSNR.")
    ] = VQGANRecipe.squared_weight,
    discriminator_start: Annotated[
        float, typer.Option(help="Share of the steps before the discriminator starts; 1 disables it.")
    ] = VQGANRecipe.discriminator_start,
    discriminator_weight: Annotated[
        float, typer.Option(help="Norm of the adversarial gradient, relative to the reconstruction gradient's.")
    ] = VQGANRecipe.discriminator_weight,
    crop_from: Annotated[
        int | None, typer.Option(help="Read pictures at this side in pixels, and train on crops of --picture-side.")
    ] = VQGANRecipe.crop_from,
    decoder_only: Annotated[
        bool, typer.Option(help="Train only the decoder of --init-from; shards made with it stay valid.")
    ] = VQGANRecipe.decoder_only,
    flip: Annotated[
        bool, typer.Option(help="Mirror half of the pictures; not if left and right matter.")
    ] = VQGANRecipe.flip,
    precision: Precision = VQGANRecipe.precision,
    save_dtype: Annotated[StoredDtype, typer.Option(help="Type of the stored weights.")] = "float32",
    max_minutes: MaxMinutes = None,
    device: Device = "auto",
) -> None:
    """Train a small VQGAN; `preprocess --vqgan` takes OUT."""
    options = locals()
    import dataclasses

    import torch

    from dalle_lean.images.vqgan import VQGAN, VQGANConfig
    from training.vqgan.run import VQGANRun

    if channel_multipliers is not None:
        options["channel_multipliers"] = parse_multipliers(channel_multipliers)
    if decoder_only and init_from is None:
        raise UserError("--decoder-only trains the decoder of an existing VQGAN: name it with --init-from FOLDER")
    first = None if init_from is None else VQGAN.load(init_from)
    config = VQGANConfig(**EMOJI) if first is None else first.config
    shape = {spec.name: options.get(spec.name) for spec in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{name: value for name, value in shape.items() if value is not None})
    recipe = recipe_of(VQGANRecipe, options, config=config)
    inputs = {"heldout": heldout, "init_from": first, "save_dtype": getattr(torch, save_dtype)}
    train_run(VQGANRun, data, out, recipe, "VQGAN", device, max_minutes, **inputs)


def parse_multipliers(text: str) -> tuple[int, ...]:
    """ "1,1,2,4" -> (1, 1, 2, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"channel_multipliers={text!r}: must be comma-separated integers, such as 1,1,2,4") from None
