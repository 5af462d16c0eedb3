"""What commands share: options, output, error messages and progress bars. Only command modules import it."""

import importlib.metadata
import logging
import math
import os
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from dalle_lean.errors import UserError, is_out_of_memory
from dalle_lean.progress import OnNotice, OnProgress

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is CUDA if there is a GPU.")]
BatchSize = Annotated[int | None, typer.Option(help="Pictures drawn at once. [default: by the free memory]")]
StoredDtype = Literal["float32", "bfloat16"]
"""Types of stored weights, by torch's names."""
OTHER_DESTINATIONS = "a folder, or a URL for fsspec such as s3://BUCKET/NAME"


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def echo(line: str) -> None:
    """Print a line to standard output."""
    out.print(line, markup=False)


class StdoutHandler(logging.Handler):
    """Prints log messages as plain lines to standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        echo(record.getMessage())


def show_log(name: str) -> None:
    """Print the messages of this logger from now on, INFO and above."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(StdoutHandler())


def warn(line: str) -> None:
    """Print a warning to standard error."""
    err.print(f"warning: {line}", style="yellow", markup=False)


def error(line: str) -> None:
    """Print a one-line error message to standard error."""
    err.print(f"error: {line}", style="red", markup=False)


def notice(line: str) -> None:
    """Print a line that is not an error to standard error."""
    err.print(line, markup=False)


def explain(failure: Exception) -> int:
    """Print to standard error why the program ends; return its exit code.

    What the user can fix is one line and code 2: a UserError, files that cannot be read or written, lack of memory.
    Anything else is a bug: a traceback and code 1. With DALLE_LEAN_TRACEBACK in the environment, raise it instead.
    """
    if os.environ.get("DALLE_LEAN_TRACEBACK"):
        raise failure
    if isinstance(failure, UserError | OSError) or is_out_of_memory(failure):
        error(" ".join(str(failure).split()) or type(failure).__name__)
        return 2
    traceback.print_exception(failure)
    version = importlib.metadata.version("dalle-lean")
    error(f"this is a bug of dalle-lean {version}; please report it with the lines above")
    return 1


def begin_loading() -> None:
    """Call this before slow imports: it shows `loading ...` and silences the libraries' deprecation warnings."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    if err.is_terminal:
        err.print("loading ...", end="\r")


LINE_INTERVAL_S = 10.0


@contextmanager
def waiting_told() -> Iterator[OnNotice]:
    """Until the block ends, print every 10 s to standard error what it waits for and how long it has waited in all;
    yields the callback that names what it waits for from then on."""
    what, ended, started_s = "", threading.Event(), time.monotonic()

    def wait_for(named: str) -> None:
        nonlocal what
        what = named

    def print_lines() -> None:
        while not ended.wait(LINE_INTERVAL_S):
            notice(f"waiting for {what}, {time.monotonic() - started_s:.0f} s so far")

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield wait_for
    finally:
        ended.set()
        thread.join()


# The period over which Rich averages the rate; a large model's step takes minutes.
RATE_PERIOD_S = 300.0
LEAST_PERIOD_S = 0.1  # over which a rate is measured: what is reported in one burst has none
SLOW_RATE = 0.5  # items per second below which seconds per item are shown instead


class RateColumn(ProgressColumn):
    """Finished items per second."""

    def __init__(self, unit: str):
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        if task.fields["reported_s"] < LEAST_PERIOD_S:
            rate = None
        if rate and rate < SLOW_RATE:
            return Text(f"{1 / rate:.0f} s each")
        return Text(f"{rate:.1f} {self.unit}/s" if rate else f"- {self.unit}/s")


@contextmanager
def progress_bar(description: str, unit: str) -> Iterator[OnProgress]:
    """A progress bar with the count, the rate in `unit`/s and the time left; yields the callback that moves it. If
    standard error is not a terminal, it prints a plain line every 10 s and one at the end instead."""
    watched = err.is_interactive and err.file.isatty()
    # Only the bar may shrink; what still does not fit is cut, so that it never takes a second line.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        RateColumn(unit),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}", markup=False),
    )
    text_columns = [column for column in columns if not isinstance(column, BarColumn)]
    printed_s, pending, first_s = time.monotonic(), False, math.inf
    with Progress(*columns, console=err, disable=not watched, speed_estimate_period=RATE_PERIOD_S) as progress:
        number = progress.add_task(description, total=None, note="", reported_s=0.0)
        task = progress.tasks[number]
        progress.live.transient = True  # an error before the first step leaves no empty bar above its line

        def print_line() -> None:
            nonlocal printed_s, pending
            printed_s, pending = time.monotonic(), False
            err.print(" ".join(str(column(task)) for column in text_columns).strip(), markup=False)

        def on_progress(done: int, total: int, note: str = "") -> None:
            nonlocal pending, first_s
            first_s = min(first_s, time.monotonic())
            progress.live.transient = False
            reported_s = time.monotonic() - first_s
            progress.update(number, completed=done, total=total, note=note, reported_s=reported_s)
            pending = not watched
            if pending and time.monotonic() - printed_s >= LINE_INTERVAL_S:
                print_line()

        yield on_progress
        if pending:
            print_line()
