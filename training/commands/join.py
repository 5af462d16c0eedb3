"""The commands `dalle-lean join` and `dalle-lean doctor`."""

import os
import signal
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from dalle_lean.errors import UserError
from dalle_lean.terminal import LINE_INTERVAL_S, Device, begin_loading, err, error, out, say

if TYPE_CHECKING:
    from training.swarm.preflight.checks import Check

Data = Annotated[
    str | None, typer.Option(help="The run's shards: folder or URL. [default: where the run says]", show_default=False)
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Where this machine keeps its identity and its place in the data, to go on from. "
        "[default: ~/.cache/dalle-lean/runs/RUN]",
        show_default=False,
    ),
]
Listen = Annotated[int | None, typer.Option(help="Take connections on this TCP port.", min=1, max=65535)]
Client = Annotated[bool, typer.Option("--client", help="Take no connections. [default: whichever works]")]
Announce = Annotated[
    list[str] | None,
    typer.Option(help="How others reach the port of --listen, as /ip4/ADDRESS/tcp/PORT, where it is forwarded."),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples between two reports. [default: measured]", min=1, show_default=False)
]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. [default: the run's]", show_default=False)]
STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
GOODBYES = {
    signal.SIGINT: "saying goodbye to the others ... (Ctrl+C again stops at once)",
    signal.SIGTERM: "ended by SIGTERM: saying goodbye to the others ...",
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
    name: Annotated[
        str | None, typer.Option(help="To be called by in the list of who gave how much.", show_default=False)
    ] = None,
) -> None:
    """Take part in a run: check this machine, get the run's state, train. Ctrl+C leaves; the same command goes on.

    Several GPUs are one peer: torchrun --standalone --nproc-per-node GPUS --no-python dalle-lean join ADDRESS
    """
    from dalle_lean.devices import pick_device
    from dalle_lean.require import require

    begin_loading()
    for module in ("hivemind", "psutil", "pyarrow"):
        require(module, extra="training")
    from training.swarm.network.dht import log_to, prepare_process
    from training.swarm.peer.join import Volunteer, follow, measure, take_part
    from training.swarm.peer.status_line import summary
    from training.swarm.preflight.survey import Options, survey

    prepare_process()
    log_to(None)
    if int(os.environ.get("LOCAL_RANK", 0)):
        return follow(pick_device(device).type)
    options = Options(data, folder, listen, client, announce or (), batch_size, device, precision, name)
    while True:
        found = survey(target, options, show)
        refuse(found.problems)
        say("measuring how fast this machine is ...")
        fit = measure(found, options)
        slow = "; slow for this model, but every sample counts" if fit.report_s > 60 else ""
        say(
            f"{fit.samples_at_once / fit.seconds:.3g} samples/s: {fit.batch_size} samples between two reports, "
            f"{fit.samples_at_once} at once{slow}"
        )
        peers: list[Volunteer] = []
        line = LiveLine(peers)
        try:
            moved = take_part(
                found,
                options,
                fit,
                on_ready=peers.append,
                on_step=line.on_step,
                on_download=line.on_download,
                on_notice=line.on_notice,
                on_stop=line.on_stop,
            )
        finally:
            line.close()
            if peers:
                say(summary(peers[0].standing(), peers[0].folder))
        if moved is None:
            return None
        say(moved)
        target = list(found.addresses)


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS_OR_FILE]", help="A run, to check this machine for it as `join` does."),
    ] = None,
    data: Data = None,
    folder: Folder = None,
    listen: Listen = None,
    client: Client = False,
    announce: Announce = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    precision: Precision = None,
) -> None:
    """Tell what works on this machine, and what to do about what does not; exit code 2 where there is a problem."""
    begin_loading()
    from dalle_lean.devices import pick_device
    from training.swarm.preflight.checks import (
        PROBLEM,
        check_data,
        check_device,
        check_disk,
        check_versions,
        installed_versions,
    )
    from training.swarm.preflight.self_test import check_bundled_model, check_memory_there, check_numba, check_torch

    checks = []

    def tell(check: "Check") -> None:
        checks.append(check)
        show(check)

    versions = installed_versions()
    where = pick_device(device)
    together = versions["hivemind"] is not None
    if together:
        from training.swarm.network.dht import prepare_process
        from training.swarm.preflight.self_test import check_hivemind, check_port
        from training.swarm.preflight.survey import Options, port_is_free, survey

        prepare_process()
    if not (target and together):
        tell(check_versions(versions))
        tell(check_device(where))
    tell(check_torch(where))
    tell(check_numba())
    if together:
        tell(check_hivemind())
    tell(check_bundled_model())
    if together and listen is not None:
        tell(check_port(listen, port_is_free(listen)))
    if target and together:
        options = Options(data, folder, listen, client, announce or (), batch_size, device, precision)
        checks += survey(target, options, show).checks
    else:
        tell(check_memory_there(where))
        tell(check_disk(folder or Path.home() / ".cache" / "dalle-lean", 0))
        if data:
            tell(check_data(data)[0])
    found = [check for check in checks if check.level == PROBLEM]
    noted = sum(check.level == "warning" for check in checks)
    counts = f"{len(found)} problem{'s' * (len(found) != 1)}, {noted} warning{'s' * (noted != 1)}"
    say(f"{len(checks)} checks: {counts if found or noted else 'all well'}")
    if found:
        raise typer.Exit(2)


def show(check: "Check") -> None:
    """A check's lines: its level and name, what was found, its cure."""
    room = max(40, min(out.width, 120)) - 22
    found, *others = wrapped(check.found, room)
    text = Text.assemble((f"{check.level:<8}", STYLES[check.level]), f" {check.name:<12} {found}")
    for line in others:
        text.append(f"\n{'':22}{line}")
    if check.level != "ok":
        for line in wrapped(f"-> {check.cure}", room):
            text.append(f"\n{'':22}{line}", style="bold")
    out.print(text)


def wrapped(text: str, width: int) -> list[str]:
    """Lines; paths stay whole where they can."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def refuse(problems: "list[Check]") -> None:
    """ValueError, in one sentence, where something keeps this machine out."""
    if problems:
        first = problems[0]
        more = f" ({len(problems) - 1} more above)" if len(problems) > 1 else ""
        raise UserError(f"{first.name}: {first.found}; {first.cure}{more}")


class LiveLine:
    """The line of a download, or of the standing, brought up to date twice a second; where nobody watches (a file, a
    pipe) a plain one now and then."""

    def __init__(self, peers: list[Any]):
        self.peers, self.began_s = peers, 0.0
        self.download: Any = None
        self.said_s = time.monotonic()
        self.live = Live(console=err, get_renderable=self.render, refresh_per_second=2)
        self.watched = err.is_interactive and err.file.isatty()

    def text(self, width: int) -> str:
        if self.download is not None:
            line: str = self.download.line(width)
            return line
        standing: str = self.peers[0].standing().line(width) if self.peers else ""
        return standing

    def render(self) -> Text:
        return Text(self.text(err.width - 1), no_wrap=True, overflow="crop")

    def on_step(self, *_: object) -> None:
        """A batch is done; before the first one nothing is shown, and no thread is there to be forked."""
        self.download = None
        self.refresh()

    def on_download(self, received: int, total: int, donor: str) -> None:
        from training.swarm.peer.status_line import Download

        now_s = time.monotonic()
        if self.download is None:
            self.began_s = now_s
        self.download = Download(received=received, total=total, seconds=now_s - self.began_s, donor=donor)
        self.refresh(at_once=received == total)

    def refresh(self, at_once: bool = False) -> None:
        if self.watched and not self.live.is_started:
            self.live.start()
        elif not self.watched and (at_once or time.monotonic() - self.said_s >= LINE_INTERVAL_S):
            self.said_s = time.monotonic()
            err.print(self.text(120), markup=False)

    def on_notice(self, line: str) -> None:
        from training.run.graceful_stop import NOTICES

        goodbyes = {NOTICES[number]: goodbye for number, goodbye in GOODBYES.items()}
        say(goodbyes.get(line, line))

    def on_stop(self) -> None:
        self.close()
        error("stopped at once; the others go on without this machine, and the same command takes part again")

    def close(self) -> None:
        """The last line stays."""
        if self.live.is_started:
            self.live.stop()
