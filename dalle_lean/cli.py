"""The program `dalle-lean`, one command per job.

A command's module is imported only when the command runs, so `dalle-lean --help` answers at once.
"""

import sys

INTERRUPTED = 130

try:
    import importlib
    import importlib.metadata
    import os
    import re
    import shlex
    from collections.abc import Callable, Sequence
    from itertools import pairwise
    from typing import Annotated, Any

    import typer

    from dalle_lean.ending import EXIT_CODE, Terminated
    from dalle_lean.terminal import error, explain, notice, show_log
except KeyboardInterrupt:  # Ctrl+C may come before `main` can catch it
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)

MAY_BE_EMPTY = {"--prompt-page", "--publish"}  # '' turns them off

# name: (module:function, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "preprocess": ("preprocessing.commands.preprocess:preprocess", "Turn captioned pictures into shards of codes."),
    "shards": ("preprocessing.commands.shards:shards", "Check, show, adopt, mix and publish folders of shards."),
    "train": ("training.commands.train:train", "Train the transformer on shards, on this machine."),
    "monitor": ("training.commands.monitor:monitor", "Follow a run: loss, peers, speed, contributions."),
    "host": ("training.commands.host:host", "Host a run for volunteers: helpers, state, checkpoints."),
    "rollback": ("training.commands.host:rollback", "Take a hosted run back to one of its checkpoints."),
    "invite": ("training.commands.admission:invite", "Create a code with which a volunteer joins a hosted run."),
    "ban": ("training.commands.admission:ban", "Ban a peer, or everyone who joined with a code."),
    "unban": ("training.commands.admission:unban", "Lift a ban."),
    "join": ("training.commands.join:join", "Join a run over the Internet: checks, then training."),
    "doctor": ("training.commands.join:doctor", "Check what works on this machine, and how to fix the rest."),
    "generate": ("inference.commands.generate:generate", "Draw prompts: pictures, their scores, a contact sheet."),
    "evaluate": ("inference.commands.evaluate:evaluate", "Measure how well a model draws what prompts ask for."),
    "demo": ("demo.commands:demo", "Serve the prompt page for a browser."),
    "serve": ("demo.serve.commands:serve", "Draw for pages and programs on several GPUs or machines."),
    "train-vqgan": ("training.commands.vqgan:train_vqgan", "Train a small VQGAN on a folder of pictures."),
    "train-clip": ("training.commands.clip:train_clip", "Train a small CLIP on pictures with captions."),
    "train-things": ("training.commands.things:train_things", "Train a classifier that names the thing in a picture."),
    "pack": ("dalle_lean.commands:pack", "Put the parts of a model into one model folder."),
    "calculator": ("demo.calculator.commands:calculator", "Compute what training a model costs: memory, FLOP."),
    "bench": ("benchmarks.commands:bench", "Measure this machine, beside the published figures."),
    "convert": ("dalle_lean.convert.commands:convert", "Convert between published checkpoints and model folders."),
}

SERVERS = ("monitor", "demo", "serve", "calculator")
"""Commands with nothing to finish or to go on with."""

# pydantic's type of error: what is wrong, with its `ctx`
PLAIN = {
    "value_error": "{error}",
    "int_parsing": "{input!r} is not a whole number.",
    "float_parsing": "{input!r} is not a number.",
    "greater_than_equal": "{input} must be at least {ge}.",
    "less_than_equal": "{input} must be at most {le}.",
}


def load(target: str) -> Callable[..., Any]:
    """The function or Typer app that "module:name" names."""
    module, name = target.split(":")
    command: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return command


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dalle-lean {importlib.metadata.version('dalle-lean')}")
        raise typer.Exit


def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=show_version)] = False,
) -> None:
    """Options in front of the command."""


def build_app(command_name: str | None) -> typer.Typer:
    """The program with the real command `command_name`; all other commands are only a line of help."""
    app = typer.Typer(
        name="dalle-lean",
        help="A text-to-image transformer that anyone can train together over the Internet and run at home.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Rich's tables cut long names and drop text in brackets
    )
    app.callback()(options)
    for name, (target, summary) in COMMANDS.items():
        if name == command_name:
            command = load(target)
            if isinstance(command, typer.Typer):  # a command with subcommands
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
        else:
            app.command(name, help=summary)(lambda: None)
    return app


def usage_mistake(failure: Any) -> str:
    """What a usage error of Typer's says, in plain words where Typer quotes pydantic, and which help to see."""
    message: str = failure.format_message()
    if hasattr(failure.__cause__, "errors"):
        found = failure.__cause__.errors()[0]
        plain = PLAIN.get(found["type"], "{msg}")
        message = message.replace(failure.message, plain.format(**found, **found.get("ctx", {})))
    context = getattr(failure, "ctx", None)
    if context is None or "\n" in message:  # a whole help
        return message
    if context.parent is None and (unknown := re.fullmatch(r"No such command '(\w+)'\.", message)):
        does = [name for name, (_, summary) in COMMANDS.items() if summary.lower().startswith(f"{unknown[1]} ")]
        message += f" Did you mean {' or '.join(map(repr, does))}?" if does else ""
    names = ["--help"]
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return f"{message}{'' if message[-1] in '.?' else '.'} See dalle-lean {' '.join(names)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `dalle-lean` and exit: 0 for success, 130 after Ctrl+C, 143 after a handled SIGTERM, 2 for wrong options,
    otherwise the code from `explain`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    show_log("training")
    if "OMP_WAIT_POLICY" not in os.environ:
        # GNU OpenMP reads it when torch is imported. By default a thread that waits for another keeps its core for
        # milliseconds, on which the other may have to wait in turn where programs share the cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    empty = {before for before, argument in pairwise(["", *arguments]) if argument == ""}
    options = (argument.partition("=") for argument in arguments if argument.startswith("--"))
    empty |= {name for name, sign, value in options if sign and not value}
    if empty - MAY_BE_EMPTY:  # an empty folder would be the current one
        error("an argument is empty; give it a value or leave it out (from a variable that is not set?)")
        sys.exit(2)
    command_name = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        code = build_app(command_name)(arguments, standalone_mode=False)
    except Terminated:
        kept = f"; what was finished is saved. To go on: dalle-lean {shlex.join(arguments)}"
        notice("stopped by SIGTERM" if command_name in SERVERS else f"ended by SIGTERM{kept}")
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:  # while the command's module was imported
        notice("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as failure:
        if hasattr(failure, "format_message"):  # Typer's own usage errors
            error(usage_mistake(failure))
            sys.exit(2)
        sys.exit(explain(failure))
    if code == INTERRUPTED:  # Typer returns this code after Ctrl+C
        # `join` has said what this machine gave and how to go on.
        notice("stopped" if command_name in (*SERVERS, "join") else "stopped; only what was finished is kept")
    sys.exit(code if isinstance(code, int) else 0)
