"""The command `dalle-lean monitor`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dalle_lean.terminal import begin_loading, say, warn
from dalle_lean.terminal import out as terminal

if TYPE_CHECKING:
    from training.swarm.observe.monitor import Leaderboard, Overview
    from training.swarm.observe.peer_metrics import PeerRecords

SHOWN_PEERS = 20


def monitor(
    source: Annotated[
        str,
        typer.Argument(metavar="ADDRESS_OR_FILE", help="Address of the run, as `host` prints it, or its swarm.toml."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the metrics; a later call goes on in it. [default: runs/monitor-NAME]"),
    ] = None,
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=1.0)] = 10.0,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Send the metrics to this project of Weights & Biases, too.")
    ] = None,
    once: Annotated[bool, typer.Option(help="Look once, show it and end.")] = False,
) -> None:
    """Follow a run that others train: loss, peers, speed, time left, who gave how much.

    Writes metrics.jsonl, tensorboard/ and contributions.json. Takes no part in the run.
    """
    begin_loading()
    from training.run.folder import run_folder
    from training.swarm.host.checkpoints import first_name
    from training.swarm.network.dht import log_to, prepare_process
    from training.swarm.observe.monitor import CONTRIBUTIONS, Leaderboard, Monitor, Outputs

    prepare_process()
    log_to(None)
    with ExitStack() as stack:
        following = stack.enter_context(Monitor(source, warn))
        run = first_name(following.settings.swarm.name)  # it gets another one each time it is taken back
        out = out or Path("runs") / f"monitor-{run}"
        stack.enter_context(run_folder(out))
        board = Leaderboard(out / CONTRIBUTIONS, run)
        outputs = Outputs(out, wandb)
        stack.callback(outputs.close)
        live = None
        if terminal.is_terminal and not once:
            live = stack.enter_context(Live(console=terminal, auto_refresh=False))
        while True:
            started_s = time.monotonic()
            records, overview = following.look()
            board.update(records.by_peer)
            if overview is not None:
                outputs.write(overview, following.settings.run_id)
            if live is not None:
                live.update(Group(Text(headline(overview)), table_of(board, records)), refresh=True)
            else:
                say(headline(overview))
            if once:
                terminal.print(table_of(board, records))
                return
            time.sleep(max(0.0, interval_s - (time.monotonic() - started_s)))


def headline(overview: Overview | None) -> str:
    """The run in a line."""
    if overview is None:
        return "no trainer is heard of"
    speed, word = overview.samples_per_s, "samples/s"
    if speed is None:
        speed, word = overview.reported_samples_per_s, "samples/s, as peers say"
    parts = [
        f"step {overview.step} of {overview.total_steps}",
        "no loss yet" if overview.loss is None else f"loss {overview.loss:.4f}",
        f"{overview.peers} trainer{'s' if overview.peers > 1 else ''} ({overview.clients} in client mode)",
        f"{speed:.1f} {word}",
    ]
    if overview.left_s is not None:
        parts.append(f"{duration(overview.left_s)} left")
    troubles = {
        "batches dropped": overview.dropped_batches,
        "tensors dropped": overview.dropped_tensors,
        "steps skipped": overview.skipped_steps,
        "steps taken alone": overview.solo_steps,
        "downloads of the state": overview.resyncs,
        "records refused": overview.refused_records,
    }
    return " · ".join([*parts, *(f"{count} {what}" for what, count in troubles.items() if count)])


def duration(seconds: float) -> str:
    """In the two largest units, as 3 d 4 h."""
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def table_of(board: Leaderboard, records: PeerRecords) -> Table:
    """Who gave how much, by the peers' own count; those who are there first with their speed."""
    ranked = board.ranked()
    whole = sum(peer.total_samples for _, peer in ranked) or 1
    table = Table("peer", "name", "samples", "share", "samples/s", "step", title="contributions, as peers count them")
    for peer_id, peer in ranked[:SHOWN_PEERS]:
        record = records.by_peer.get(peer_id)
        table.add_row(
            short(peer_id),
            peer.user or "",
            f"{peer.total_samples:,}",
            f"{peer.total_samples / whole:.1%}",
            "away" if record is None else f"{record.samples_per_s:.1f}",
            "" if record is None else str(record.step),
        )
    if len(ranked) > SHOWN_PEERS:
        table.caption = f"and {len(ranked) - SHOWN_PEERS} more in contributions.json"
    return table


def short(peer_id: str) -> str:
    """The end of a peer id: all begin alike."""
    return f"..{peer_id[-8:]}"
