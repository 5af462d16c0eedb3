"""The commands `dalle-lean join` and `dalle-lean doctor`."""

import os
import signal
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from dalle_lean.errors import UserError
from dalle_lean.terminal import LINE_INTERVAL_S, Device, begin_loading, echo, err, error, out
from dalle_lean.words import counted
from training.commands.options import Code

if TYPE_CHECKING:
    from training.swarm.peer.trainer import Peer
    from training.swarm.preflight.checks import Check

Data = Annotated[str | None, typer.Option(help="The run's shards: folder or URL. [default: the run's]")]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Stores this machine's identity and position in the data. [default: ~/.cache/dalle-lean/runs/RUN]"
    ),
]
Listen = Annotated[
    int | None,
    typer.Option(help="TCP port to accept connections on. [default: a free one, if reachable]", min=1, max=65535),
]
Client = Annotated[bool, typer.Option("--client", help="Accept no connections. [default: only if unreachable]")]
Announce = Annotated[
    list[str] | None,
    typer.Option(help="IPv4 address at which others reach the --listen port, or /ip4/ADDRESS/tcp/PORT."),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples between two reports to the others. [default: measured]", min=1)
]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. [default: the run's]")]
STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
GOODBYES = {
    signal.SIGINT: "leaving the run ... (Ctrl+C again stops at once)",
    signal.SIGTERM: "ended by SIGTERM: leaving the run ...",
}


def join(
    target: Annotated[
        list[str], typer.Argument(metavar="ADDRESS_OR_FILE", help="Addresses of the run's helpers, or its swarm.toml.")
    ],
    data: Data = None,
    folder: Folder = None,
    listen: Listen = None,
    client: Client = False,
    announce: Announce = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    precision: Precision = None,
    name: Annotated[str | None, typer.Option(help="Display name on the leaderboard. [default: none]")] = None,
    code: Code = None,
) -> None:
    """Join a run: check this machine, download the run's state, train. Ctrl+C leaves; the same command continues.

    Several GPUs are one peer: torchrun --standalone --nproc-per-node GPUS --no-python dalle-lean join ADDRESS
    """
    from dalle_lean.devices import pick_device
    from dalle_lean.require import require

    begin_loading()
    for module in ("hivemind", "psutil", "pyarrow"):
        require(module, extra="training")
    from training.swarm.network.dht import prepare_process
    from training.swarm.peer.gradient_worker import run_rank
    from training.swarm.peer.join import measure, take_part
    from training.swarm.peer.status_line import summary
    from training.swarm.preflight.survey import JoinOptions, survey

    prepare_process()
    if int(os.environ.get("LOCAL_RANK", 0)):
        return run_rank(pick_device(device).type)
    options = JoinOptions(data, folder, listen, client, announce or (), batch_size, device, precision, name, code)
    while True:
        found = survey(target, options, show)
        if found.problems:
            first, *others = found.problems
            more = f" ({len(others)} more above)" if others else ""
            raise UserError(f"{first.name}: {first.found}; {first.fix}{more}")
        echo("measuring how fast this machine is ...")
        plan = measure(found, options)
        slow = "; slow for this model, but every sample counts" if plan.report_s > 60 else ""
        echo(
            f"{plan.samples_at_once / plan.seconds:.3g} samples/s: "
            f"{counted(plan.batch_size, 'sample')} between two reports, {plan.samples_at_once} at once{slow}"
        )
        line = LiveLine()
        try:
            moved = take_part(
                found,
                options,
                plan,
                on_ready=line.on_ready,
                on_step=line.on_step,
                on_download=line.on_download,
                on_notice=line.on_notice,
                on_stop=line.on_stop,
            )
        finally:
            line.close()
            if line.peer is not None:
                echo(summary(line.peer.status(), line.peer.folder))
        if moved is None:
            return None
        echo(moved)
        target = list(found.addresses)


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS_OR_FILE]", help="Also check this machine for this run, as `join` does."),
    ] = None,
    data: Data = None,
    folder: Folder = None,
    listen: Listen = None,
    client: Client = False,
    announce: Announce = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    precision: Precision = None,
    code: Code = None,
) -> None:
    """Check what works on this machine, and say how to fix what does not; exit code 2 if there is a problem."""
    begin_loading()
    from dalle_lean.devices import pick_device
    from training.swarm.preflight import checks

    found: list[Check] = []

    def report(check: "Check") -> None:
        found.append(check)
        show(check)

    versions = checks.installed_versions()
    has_hivemind = versions["hivemind"] is not None
    torch_device = pick_device(device)
    if has_hivemind:
        from training.swarm.network.dht import prepare_process
        from training.swarm.preflight.survey import JoinOptions, read_targets, survey

        prepare_process()
        options = JoinOptions(data, folder, listen, client, announce or (), batch_size, device, precision, code=code)
        if target:
            read_targets(target)  # fail here, not after the checks of this machine
    for_run = target if has_hivemind else None
    if not for_run:
        report(checks.check_versions(versions))
        report(checks.check_device(torch_device))
    report(checks.check_torch(torch_device))
    report(checks.check_numba())
    if has_hivemind:
        report(checks.check_hivemind())
    report(checks.check_bundled_model())
    if has_hivemind and listen is not None:
        report(checks.check_port(listen))
    if for_run:
        survey(for_run, options, report)
    else:
        report(checks.check_free_memory(torch_device))
        report(checks.check_disk(folder or Path.home() / ".cache" / "dalle-lean", 0))
        if data:
            report(checks.check_data(data)[0])
    problems, warnings = (sum(check.level == level for check in found) for level in ("problem", "warning"))
    counts = f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
    echo(f"{len(found)} checks: {counts if problems or warnings else 'all well'}")
    if problems:
        raise typer.Exit(2)


def show(check: "Check") -> None:
    """Print a check: its level, its name, what was found and how to fix it."""
    room = max(40, min(out.width, 120)) - 22
    found, *others = wrapped(check.found, room)
    text = Text.assemble((f"{check.level:<8}", STYLES[check.level]), f" {check.name:<12} {found}")
    for line in others:
        text.append(f"\n{'':22}{line}")
    if check.level != "ok":
        for line in wrapped(f"-> {check.fix}", room):
            text.append(f"\n{'':22}{line}", style="bold")
    out.print(text)


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text without breaking at hyphens, to keep paths whole."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


class LiveLine:
    """The status of a download or of training, updated twice a second; without a terminal, a plain line every 10 s."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.download: Callable[[int], str] | None = None  # its line, by the width
        self.began_s = 0.0
        self.printed_s = time.monotonic()
        self.live = Live(console=err, get_renderable=self.render, refresh_per_second=2)
        self.on_terminal = err.is_interactive and err.file.isatty()

    def text(self, width: int) -> str:
        if self.download is not None:
            return self.download(width)
        return "" if self.peer is None else self.peer.status().line(width)

    def render(self) -> Text:
        return Text(self.text(err.width - 1), no_wrap=True, overflow="crop")

    def on_ready(self, peer: "Peer") -> None:
        self.peer = peer

    def on_step(self) -> None:
        """Called after a batch. Shows nothing before the first one: the display's thread must not be forked."""
        self.download = None
        self.refresh()

    def on_download(self, received: int, total: int, donor: str) -> None:
        from training.swarm.peer.status_line import download_line

        now_s = time.monotonic()
        if self.download is None:
            self.began_s = now_s
        self.download = partial(download_line, received, total, donor, now_s - self.began_s)
        self.refresh(at_once=received == total)

    def refresh(self, at_once: bool = False) -> None:
        if self.on_terminal and not self.live.is_started:
            self.live.start()
        elif not self.on_terminal and (at_once or time.monotonic() - self.printed_s >= LINE_INTERVAL_S):
            self.printed_s = time.monotonic()
            err.print(self.text(120), markup=False)

    def on_notice(self, line: str) -> None:
        from training.run.graceful_stop import NOTICES

        goodbyes = {NOTICES[number]: goodbye for number, goodbye in GOODBYES.items()}
        echo(goodbyes.get(line, line))

    def on_stop(self) -> None:
        self.close()
        if self.peer is not None and self.peer.is_over:
            error("stopped at once; the run has finished")
        else:
            error("stopped at once; the run continues without this machine, and the same command rejoins it")

    def close(self) -> None:
        """Stop updating; the last line stays."""
        if self.live.is_started:
            self.live.stop()
