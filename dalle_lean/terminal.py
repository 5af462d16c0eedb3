"""What commands have in common: options, lines, mistakes and progress bars. Only command modules import it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

OnProgress = Callable[[int, int, str], None]
"""Called by long work with (done, total, note); the note is a few words such as the current loss."""

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes CUDA where there is one.")]


class StoredDtype(StrEnum):
    """Types that weights may be stored in; the values are torch's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """A line on standard output."""
    out.print(line, markup=False)


def warn(line: str) -> None:
    """A line on standard error that does not end the program."""
    err.print(f"warning: {line}", style="yellow", markup=False)


def error(line: str) -> None:
    """The one line that tells a mistake, on standard error."""
    err.print(f"error: {line}", style="red", markup=False)


class RateColumn(ProgressColumn):
    """Finished pieces per second."""

    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text(f"{rate:.1f} {self.unit}/s" if rate else f"- {self.unit}/s")


@contextmanager
def progress_bar(description: str, unit: str) -> Iterator[OnProgress]:
    """A bar with the count, the rate in `unit`/s and the time left; yields the callback that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(description, total=None, note="")

        def on_progress(done: int, total: int, note: str = "") -> None:
            progress.update(task, completed=done, total=total, note=note)

        yield on_progress
