"""The command `dalle-lean monitor`."""

from __future__ import annotations

import shutil
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dalle_lean.ending import terminate
from dalle_lean.errors import UserError
from dalle_lean.terminal import begin_loading, echo, notice, warn
from dalle_lean.terminal import out as terminal
from dalle_lean.words import counted
from training.commands.options import DEFAULT_PAGE_ADDRESS, Code, Export, PageAddress, PromptPage, check_page_options

if TYPE_CHECKING:
    from training.swarm.observe.leaderboard import Leaderboard
    from training.swarm.observe.overview import Overview
    from training.swarm.observe.peer_metrics import PeerRecords

SHOWN_PEERS = 20
COUNTER_LABELS = {
    "dropped_batches": ("batch", " dropped"),
    "dropped_tensors": ("tensor", " dropped"),
    "skipped_steps": ("step", " skipped"),
    "solo_steps": ("step", " taken alone"),
    "resyncs": ("download", " of the state"),
    "refused_records": ("record", " refused"),
    "passes": ("pass", ""),
    "bans": ("ban", ""),
}

SILENCE = {
    "finished": "finished: all {total} steps are done",
    "no answer": "no helper of the run answers: its host has stopped it, or is offline",
    "no trainers": "no trainers at the moment",
}
"""What to say of a run without trainers, by its `run_state`."""


def monitor(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS_OR_FILE",
            help="Addresses of the run, printed by `host`, its swarm.toml, or its folder on the host.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the metrics; a later call continues them. [default: runs/monitor-NAME]", show_default=False
        ),
    ] = None,
    interval_s: Annotated[float, typer.Option(help="Seconds between two updates.", min=1.0)] = 10.0,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Also send the metrics to this Weights & Biases project.")
    ] = None,
    code: Code = None,
    once: Annotated[bool, typer.Option(help="Show the run once and exit.")] = False,
    page: Annotated[bool, typer.Option(help="Serve the run's page; needs the extra demo.")] = False,
    page_address: PageAddress = DEFAULT_PAGE_ADDRESS,
    export: Export = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run, if this machine hosts it: needs no code, and the page draws with its checkpoints.",
            show_default=False,
        ),
    ] = None,
    prompt_page: PromptPage = None,
) -> None:
    """Watch a run without taking part: loss, peers, speed, time left and the leaderboard.

    Writes metrics.jsonl, tensorboard/ and contributions.json.
    """
    if page and once:
        raise UserError("--page serves until Ctrl+C, but --once exits at once: leave out one of them")
    check_page_options(page, page_address, export, prompt_page)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes start with it ignored
    begin_loading()
    from training.run.folder import is_locked, run_folder
    from training.swarm.network.dht import prepare_process
    from training.swarm.observe.leaderboard import CONTRIBUTIONS, Leaderboard
    from training.swarm.observe.monitor import Monitor, Outputs
    from training.swarm.observe.overview import run_state

    if (end := end_of(run_dir or Path(source[0]))) is not None:
        echo(end)
        return
    prepare_process()
    if page:
        from training.swarm.observe.page.server import listen_at

        listen_at(page_address).close()  # fail here, not after connecting
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, terminate))
        watcher = stack.enter_context(closing(Monitor(source, warn, run_dir, on_connect=notice)))
        run = watcher.settings.swarm.first_name  # a rollback renames the run
        out = out or Path("runs") / f"monitor-{run}"
        files, is_look = out, once and export is None and wandb is None
        if is_look and is_locked(out):  # another monitor writes there
            files = Path(stack.enter_context(TemporaryDirectory()))
            if (out / CONTRIBUTIONS).exists():
                shutil.copy(out / CONTRIBUTIONS, files)
        else:
            stack.enter_context(run_folder(out, "--out"))
        watcher.enter(out, code or "")
        board = Leaderboard(files / CONTRIBUTIONS, run)
        outputs = Outputs(files, wandb)
        stack.callback(outputs.close)
        site = None
        if page or export is not None:
            from training.swarm.observe.page.prompt_page import PromptPage
            from training.swarm.observe.page.server import served
            from training.swarm.observe.page.site import Site

            folder, local = export or out / "page", None
            if page and export is None and run_dir is not None and prompt_page is None:
                local = PromptPage(out / "prompt-page", warn)
            site = Site(folder, out, watcher, run_dir=run_dir, prompt_page=prompt_page or local, on_notice=warn)
            stack.callback(site.close)
            if page:
                echo(f"the run's page is at {stack.enter_context(served(site.folder, page_address, local))}")
        live = None
        last_step = refused = 0
        if terminal.is_terminal and not once:
            live = stack.enter_context(Live(console=terminal, auto_refresh=False))
        while True:
            started_s = time.monotonic()
            records, overview = watcher.poll()
            board.update(records.by_peer, watcher.credits)
            if overview is not None:
                outputs.write(overview, watcher.settings.run_id)
            if site is not None:
                site.poll(overview, board, records)
            total = watcher.settings.total_steps
            if overview is not None and overview.host_step is not None:
                last_step = overview.host_step
            state = run_state(overview, last_step, total, watcher.is_answered)
            line = headline(overview, refused) if overview else SILENCE[state].format(total=total)
            refused = overview.counters.get("refused_calls", 0) if overview else refused
            if live is not None:
                live.update(Group(Text(line), table_of(board, records)), refresh=True)
            else:
                echo(line)
            if once:
                terminal.print(table_of(board, records))
                return
            time.sleep(max(0.0, interval_s - (time.monotonic() - started_s)))


def end_of(folder: Path) -> str | None:
    """How the run that this machine hosted in a folder ended; None for one that goes on, or is hosted elsewhere.

    `folder` may also be its swarm.toml.
    """
    from training.run.folder import is_locked
    from training.swarm.config import SWARM_TOML, read_settings
    from training.swarm.host.checkpoints import newest_checkpoint

    folder = folder.parent if folder.name == SWARM_TOML else folder
    newest = newest_checkpoint(folder)
    if newest is None or is_locked(folder):
        return None
    total = read_settings(folder).total_steps
    if newest.step < total:
        return None
    return f"{SILENCE['finished'].format(total=total)}; the model is in {newest.folder / 'model'}"


def headline(overview: Overview, refused_before: int = 0) -> str:
    """Summarize the run in one line.

    Args:
        refused_before: calls that were refused before the previous line, which are not told of again.
    """
    speed, unit = overview.samples_per_s, "samples/s"
    if speed is None:
        speed, unit = overview.reported_samples_per_s, "samples/s, as reported by peers"
    step, total, host_step = overview.step, overview.total_steps, overview.host_step
    behind = step >= total and host_step is not None and host_step < total
    parts = [
        f"step {step} of {total}" + (f" (the host is at step {host_step})" if behind else ""),
        "no loss yet" if overview.loss is None else f"loss {overview.loss:.4f}",
        f"{counted(overview.peers, 'trainer')} ({overview.clients} in client mode)",
        f"{speed:.1f} {unit}",
    ]
    if overview.left_s is not None:
        parts.append(f"{duration(overview.left_s)} left")
    counts = ((overview.counters.get(name, 0), *label) for name, label in COUNTER_LABELS.items())
    parts += [counted(count, noun) + rest for count, noun, rest in counts if count]
    refused = overview.counters.get("refused_calls", 0) - refused_before
    if refused > 0:
        parts.append(f"{counted(refused, 'more call' if refused_before else 'call')} refused")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as 3 d 4 h."""
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def table_of(board: Leaderboard, records: PeerRecords) -> Table:
    """The leaderboard by the samples that helpers averaged; what peers claim, and of those present speed and step."""
    ranked = board.ranked()
    total = sum(peer.averaged_samples for _, peer in ranked) or 1
    columns = ("peer", "name", "samples", "share", "hours", "claimed", "samples/s", "step")
    table = Table(
        *columns, title="contributions: averaged by the helpers; claimed by the peers, with what is not averaged yet"
    )
    for peer_id, peer in ranked[:SHOWN_PEERS]:
        record = records.present(peer_id)
        table.add_row(
            f"..{peer_id[-8:]}",  # all ids begin alike
            peer.user or "",
            f"{peer.averaged_samples:,.0f}",
            f"{peer.averaged_samples / total:.1%}",
            f"{peer.averaged_s / 3600:.1f}",
            f"{peer.total_samples:,}",
            "away" if record is None else f"{record.samples_per_s:.1f}",
            "" if record is None else str(record.step),
        )
    if len(ranked) > SHOWN_PEERS:
        table.caption = f"and {len(ranked) - SHOWN_PEERS} more in contributions.json"
    return table
