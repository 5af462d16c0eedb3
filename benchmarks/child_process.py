"""Child processes, each with the torch of its own environment, that measure models on request.

A child reads its task as JSON from its command line and answers every request, a line of JSON on its standard input,
with a line of JSON. Children import this file, so it imports little but torch and the standard library.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from dalle_lean.errors import UserError

ROOT = Path(__file__).parent.parent
# The interpreter's own packages come before this repository, which may lie among another interpreter's packages. Those
# of the current folder, "", must not be found; -P would do for Python 3.11 and later, but a reference may be older.
RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def open_task() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """The child's task and a function that answers; sets the number of threads."""
    # Libraries that print must not spoil the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    return task, lambda figures: print(json.dumps(figures), file=answers, flush=True)


def requests() -> Iterator[Any]:
    """The requests to a child, until its parent is done."""
    return (json.loads(line) for line in sys.stdin)


class Child:
    """The parent's end of a child, which runs `module` in the interpreter `python`; a context manager."""

    def __init__(self, python: str, module: str, task: dict[str, Any]):
        threads = str(task["threads"])
        self.name = f"{module} in {python}"
        self.process = subprocess.Popen(
            [os.path.abspath(python), "-c", RUN_MODULE, str(ROOT), module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.process.kill()
        self.process.communicate()

    def answer(self) -> dict[str, Any]:
        """The child's next answer; it gives the first without a request."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended before it answered; the reason is above")
        return dict(json.loads(line))

    def ask(self, request: Any = None) -> dict[str, Any]:
        """The answer to a request."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()
