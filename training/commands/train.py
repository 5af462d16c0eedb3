"""The command `dalle-lean train`."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.terminal import Device, echo, progress_bar, warn
from training.commands.options import MaxMinutes, Out, TokenizerFile


def train(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="Folder of shards written by `preprocess`, or its URL (https, s3, hf, ...)."
        ),
    ],
    out: Out,
    config: Annotated[str, typer.Option(help="Recipe: a name or a TOML file.")] = "emoji128",
    init: Annotated[Path | None, typer.Option(help="Model folder to start from, in place of new weights.")] = None,
    tokenizer: TokenizerFile = None,
    heldout: Annotated[
        str | None,
        typer.Option(
            help="Shards to measure on. [default: a share of DATA, which is not trained on]", show_default=False
        ),
    ] = None,
    vqgan: Annotated[
        Path | None,
        typer.Option(
            help="VQGAN that made the codes; it draws samples and goes into the model folder. "
            "[default: the bundled model's, if it made them]",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; the warm-up keeps its share.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of initial weights and data order.", min=0)] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (autocast), or bf16-weights.")] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="With torchrun: ddp replicates the model on every process, fsdp shards it. "
            "[default: ddp if the model fits]",
            show_default=False,
        ),
    ] = None,
    max_minutes: MaxMinutes = None,
    device: Device = "auto",
) -> None:
    """Train the transformer on shards. Options default to the recipe's values.

    Several GPUs: torchrun --nproc-per-node GPUS --no-python dalle-lean train ... (docs/several-gpus.md)
    """
    import logging
    from contextlib import nullcontext

    from dalle_lean.devices import pick_device
    from dalle_lean.tokenizer import find_tokenizer
    from training.data.catalog import find_shards
    from training.run.folder import run_folder
    from training.run.processes import open_processes
    from training.run.recipe import load_recipe
    from training.step.build import bundled_vqgan
    from training.trainer import train as run

    recipe = load_recipe(config, needs_model=init is None).override(
        steps=steps, batch_size=batch_size, lr=lr, seed=seed, precision=precision
    )
    picked_device = str(pick_device(device))
    processes = open_processes(picked_device)
    if not processes.first:
        logging.disable(logging.INFO)  # the first process logs for all
    vqgan = vqgan or bundled_vqgan(find_shards(data, on_notice=warn).info)
    with run_folder(out) if processes.first else nullcontext():
        if vqgan is None and processes.first:
            warn(f"{out / 'model'} will have no VQGAN, which generate needs: name the codes' VQGAN with --vqgan")
        with progress_bar("training", "samples") if processes.first else nullcontext() as on_progress:
            progress = run(
                data,
                out,
                recipe,
                tokenizer=find_tokenizer(tokenizer),
                heldout=heldout,
                vqgan=vqgan,
                init=init,
                device=picked_device,
                parallel=parallel,
                max_minutes=max_minutes,
                on_progress=on_progress,
            )
    processes.close()
    if processes.first:
        echo(progress.last_line(recipe.schedule.total_steps, f"the model is in {out / 'model'}"))
