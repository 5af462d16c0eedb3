"""Models in processes of their own, each with the torch of its own environment: a request in, its figures back.

A child reads its task as JSON from its command line and answers every line of its standard input, a request in JSON,
with a line of JSON. It imports this file, so nothing but torch and the standard library is imported here.
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
# The interpreter's own packages come first, also where this package lies among another interpreter's; those of the
# current folder, "", never: -P would do for Python 3.11 and later, but a reference may need an earlier one.
RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def open_task() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """The child's task, its threads set, and how it answers."""
    # Libraries that print must not spoil the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    return task, lambda figures: print(json.dumps(figures), file=answers, flush=True)


def requests() -> Iterator[Any]:
    """What a child is asked, until its parent is done."""
    return (json.loads(line) for line in sys.stdin)


class Child:
    """The parent's end: `module` of this package, run by the interpreter `python`; a context manager."""

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
        """The next line of the child; the first one comes unasked."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended before it answered; it says why above")
        return dict(json.loads(line))

    def ask(self, request: Any = None) -> dict[str, Any]:
        """The answer to a request; a child that trains needs no words."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()
