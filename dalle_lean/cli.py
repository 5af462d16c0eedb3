"""The program `dalle-lean`: one word per job.

A room's module is imported only when one of its commands runs, so `dalle-lean --help` answers at once.
"""

import importlib
import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from dalle_lean.ending import EXIT_CODE, Terminated
from dalle_lean.terminal import error, explain, show_log, tell

# word: (where its function lives, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "preprocess": ("preprocessing.commands.preprocess:preprocess", "Pictures with captions -> shards of VQGAN codes."),
    "shards": ("preprocessing.commands.shards:shards", "Check, show, adopt, mix and publish folders of shards."),
    "train": ("training.commands.train:train", "Train the transformer on shards, on this machine."),
    "monitor": ("training.commands.monitor:monitor", "Follow a run that others train: loss, peers, who gave how much."),
    "host": ("training.commands.host:host", "Keep a run alive for volunteers: helpers, state, checkpoints."),
    "rollback": ("training.commands.host:rollback", "Take a hosted run back to one of its checkpoints."),
    "invite": ("training.commands.admission:invite", "Invite volunteers to a hosted run: a code to join it with."),
    "ban": ("training.commands.admission:ban", "Ban a peer, or all who came with a code, from a hosted run."),
    "unban": ("training.commands.admission:unban", "Take back a ban."),
    "join": ("training.commands.join:join", "Take part in a run over the Internet: checks, then training."),
    "doctor": ("training.commands.join:doctor", "What works on this machine, and what to do about what does not."),
    "generate": ("inference.commands.generate:generate", "Draw prompts: pictures, a contact sheet and their scores."),
    "evaluate": ("inference.commands.evaluate:evaluate", "How well a model draws what it is asked for: a report."),
    "demo": ("demo.commands:demo", "Open the prompt page in a browser."),
    "serve": ("demo.serve.commands:serve", "Draw for pages and programs, on several GPUs or machines."),
    "train-vqgan": ("training.commands.vqgan:train_vqgan", "Train a small VQGAN on a folder of pictures."),
    "train-clip": ("training.commands.clip:train_clip", "Train a small CLIP on pictures with captions."),
    "train-things": ("training.commands.things:train_things", "Train a classifier that names the thing in a picture."),
    "pack": ("dalle_lean.commands:pack", "The parts of a model -> one model folder."),
    "calculator": ("demo.calculator.commands:calculator", "What training a model costs: memory, arithmetic."),
    "bench": ("benchmarks.commands:bench", "How fast this machine is, beside the published figures."),
    "convert": ("dalle_lean.convert.commands:convert", "Published checkpoints <-> model folders."),
}

INTERRUPTED = 130


def load(target: str) -> Callable[..., Any]:
    """The function, or the Typer app of several, that "module:name" says."""
    module, name = target.split(":")
    command: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return command


def show_version(wanted: bool) -> None:
    """Say the version and exit, where it is wanted."""
    if wanted:
        typer.echo(f"dalle-lean {importlib.metadata.version('dalle-lean')}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version)
    ] = False,
) -> None:
    """What comes before the command's word."""


def build_app(word: str | None) -> typer.Typer:
    """The program, with the real command behind `word` and a line of help for every other one."""
    app = typer.Typer(
        name="dalle-lean",
        help="A text-to-image transformer that anyone can train together over the Internet and run at home.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Rich's tables cut long names and eat what stands in brackets
    )
    app.callback()(options)
    for name, (target, summary) in COMMANDS.items():
        if name == word:
            command = load(target)
            if isinstance(command, typer.Typer):  # several commands under one word
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
        else:
            app.command(name, help=summary)(lambda: None)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `dalle-lean` and exit: 0 for success, 130 for Ctrl+C, 143 for a SIGTERM that is handled, 2 for unknown
    options, else as `explain` says."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    show_log("training")
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        code = build_app(word)(arguments, standalone_mode=False)
    except Terminated:
        tell(f"ended by SIGTERM; what was finished is saved. To go on: dalle-lean {shlex.join(arguments)}")
        sys.exit(EXIT_CODE)
    except Exception as failure:
        if hasattr(failure, "format_message"):  # Typer's own usage errors
            error(failure.format_message())
            sys.exit(2)
        sys.exit(explain(failure))
    if code == INTERRUPTED:  # Typer answers Ctrl+C with this code
        tell("stopped; what was finished is kept")
    sys.exit(code if isinstance(code, int) else 0)
