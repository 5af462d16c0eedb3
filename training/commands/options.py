"""Options that the commands which train have in common."""

from pathlib import Path
from typing import Annotated

import typer

Code = Annotated[
    str | None,
    typer.Option(help="Code of the host's invitation, if the run asks for one; needed once.", show_default=False),
]
DEFAULT_PAGE_ADDRESS = "127.0.0.1:7870"
PageAddress = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where --page listens; 0.0.0.0:PORT lets other machines in.")
]
PromptPage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A prompt page (`dalle-lean demo`) that the run's page links to; '' links to none. [default: one on the "
        "newest checkpoint, under /draw/ of the page, where the host's machine serves that without --export]",
        show_default=False,
    ),
]
Export = Annotated[
    Path | None,
    typer.Option(help="Write the run's page into this folder once a minute, for any web server.", show_default=False),
]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder of the run; the same command continues what it holds.")
]
TokenizerFile = Annotated[
    str | None,
    typer.Option("--tokenizer", help="A tokenizer.json, or a hub id; without it one is made from the captions."),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps in all.", min=1)]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights and the order of the data.", min=0)]
Precision = Annotated[str, typer.Option(help="fp32 or bf16 (autocast).")]
MaxMinutes = Annotated[
    float | None, typer.Option(help="Stop and save after this many minutes; the same command continues.")
]
