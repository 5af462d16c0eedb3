"""What commands share: options, lines, error messages and progress bars. Only command modules import it."""

import importlib.metadata
import logging
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from dalle_lean.errors import UserError, is_out_of_memory
from dalle_lean.progress import OnProgress

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes CUDA where there is one.")]


DESTINATIONS = "hf://datasets/OWNER/NAME, hf://OWNER/NAME, a folder, or a URL of fsspec's such as s3://BUCKET/NAME."


class StoredDtype(StrEnum):
    """Types that weights may be stored in; the values are torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """A line on standard output."""
    out.print(line, markup=False)


class SaidLines(logging.Handler):
    """Shows what is logged as lines on standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def show_log(name: str) -> None:
    """Show what this logger gets from now on, INFO and above."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(SaidLines())


def warn(line: str) -> None:
    """A line on standard error that does not end the program."""
    err.print(f"warning: {line}", style="yellow", markup=False)


def error(line: str) -> None:
    """The one-line error message, on standard error."""
    err.print(f"error: {line}", style="red", markup=False)


def tell(line: str) -> None:
    """A line on standard error that is not an error."""
    err.print(line, markup=False)


def explain(failure: Exception) -> int:
    """Print why the program ends to standard error; returns its exit code.

    What the user can mend is one line and 2: a UserError, files that cannot be read or written, lack of memory.
    Anything else is a bug: its traceback, and 1. With DALLE_LEAN_TRACEBACK in the environment it is raised.
    """
    if os.environ.get("DALLE_LEAN_TRACEBACK"):
        raise failure
    if isinstance(failure, UserError | OSError) or is_out_of_memory(failure):
        error(" ".join(str(failure).split()) or type(failure).__name__)
        return 2
    traceback.print_exception(failure)
    error(
        f"this is a bug of dalle-lean {importlib.metadata.version('dalle-lean')}; please report it with what is above"
    )
    return 1


def begin_loading() -> None:
    """Before libraries that take a while to import, and warn of each other."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    if err.is_terminal:
        err.print("loading ...", end="\r")


LINE_INTERVAL_S = 10.0
# The period over which Rich averages the rate; a large model's step takes minutes.
RATE_PERIOD_S = 300.0
SLOW_RATE = 0.5
"""Items per second below which seconds per item are shown instead."""


class RateColumn(ProgressColumn):
    """Finished items per second."""

    def __init__(self, unit: str):
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        if rate and rate < SLOW_RATE:
            return Text(f"{1 / rate:.0f} s each")
        return Text(f"{rate:.1f} {self.unit}/s" if rate else f"- {self.unit}/s")


@contextmanager
def progress_bar(description: str, unit: str) -> Iterator[OnProgress]:
    """A bar with the count, the rate in `unit`/s and the time left; yields the callback that moves it.

    Where the output is no terminal it is a plain line every 10 s and one at the end.
    """
    watched = err.is_interactive and err.file.isatty()
    # Only the bar may become narrower: what does not fit is cut, so that the bar never takes a second line.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        RateColumn(unit),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}", markup=False),
    )
    words = [column for column in columns if not isinstance(column, BarColumn)]
    said_s, unsaid = time.monotonic(), False
    with Progress(*columns, console=err, disable=not watched, speed_estimate_period=RATE_PERIOD_S) as progress:
        number = progress.add_task(description, total=None, note="")
        task = progress.tasks[number]
        progress.live.transient = True  # a mistake before the first step leaves no empty bar above its line

        def say_line() -> None:
            nonlocal said_s, unsaid
            said_s, unsaid = time.monotonic(), False
            err.print(" ".join(str(column(task)) for column in words).strip(), markup=False)

        def on_progress(done: int, total: int, note: str = "") -> None:
            nonlocal unsaid
            progress.live.transient = False
            progress.update(number, completed=done, total=total, note=note)
            unsaid = not watched
            if unsaid and time.monotonic() - said_s >= LINE_INTERVAL_S:
                say_line()

        yield on_progress
        if unsaid:
            say_line()
