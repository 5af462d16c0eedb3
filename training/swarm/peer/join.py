"""A volunteer's session in a run, from measuring the batch to leaving."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import torch

from dalle_lean.cli import INTERRUPTED
from dalle_lean.ending import EXIT_CODE
from dalle_lean.io.files import write_bytes
from dalle_lean.progress import OnNotice
from dalle_lean.tokenizer import Tokenizer
from training.run.folder import run_folder
from training.swarm.admission.service import IDENTITY, begin_admission
from training.swarm.network import dht as network
from training.swarm.network.bootstrap_service import TOKENIZER
from training.swarm.network.orphan_reaper import end_children
from training.swarm.network.run_records import keep_own_records
from training.swarm.observe.peer_metrics import PeerMetrics, Publisher
from training.swarm.peer.gradient_worker import Work, build_model, open_peer
from training.swarm.peer.trainer import Peer
from training.swarm.preflight.batch_size import BatchPlan, measure_batch
from training.swarm.preflight.survey import NAME, JoinOptions, Survey, listen_on, ranks_here

LOG = "log"
ON_STOP_TIMEOUT_S = 1.0
LEAVE_S = 8.0
"""To leave after SIGTERM: some service managers send SIGKILL after ten seconds."""


def measure(found: Survey, options: JoinOptions) -> BatchPlan:
    assert found.batch is not None
    settings = found.run.settings
    fixed = options.batch_size is not None or settings.wire.mode == "diloco"
    plan = measure_batch(settings, found.batch, build_model(settings).to(found.device), fixed=fixed, ranks=ranks_here())
    if found.device.type == "cuda":
        torch.cuda.empty_cache()
    return plan


def take_part(
    found: Survey,
    options: JoinOptions,
    plan: BatchPlan,
    *,
    on_ready: Callable[[Peer], None],
    on_step: Callable[[], None],
    on_download: Callable[[int, int, str], None],
    on_notice: OnNotice,
    on_stop: Callable[[], None],
) -> str | None:
    """Train until the run ends, Ctrl+C or SIGTERM; returns a sentence if this peer must rejoin the run, else None.

    Args:
        on_ready: called with the peer before it starts.
        on_step: called after each batch.
        on_stop: called before this process ends at once, upon a second Ctrl+C or LEAVE_S after SIGTERM.

    Raises:
        OutOfSync, Unreachable: see Peer, dalle_lean.io.remote_io.
        ValueError: no peer can be reached, or another process uses the same folder.
        KeyboardInterrupt, Terminated: upon Ctrl+C or SIGTERM, after leaving.
    """
    assert found.shards is not None
    settings = found.run.settings
    with run_folder(found.folder, "--folder"), ExitStack() as stack:
        network.log_to(found.folder / LOG)
        found.run.write(found.folder)
        if options.user is not None:
            write_bytes(found.folder / NAME, options.user.encode())
        dht = network.open_dht(
            found.addresses,
            client_mode=not found.port,
            listen=listen_on(found.port),
            announce=options.announced,
            identity=found.folder / IDENTITY,
            gate=found.gate,
        )
        if found.gate is not None:
            begin_admission(dht, found.addresses)
        stack.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        stack.callback(dht.shutdown)
        keep_own_records(dht, settings)
        publisher = Publisher(dht, settings.run_id, user=options.user)
        stack.push(lambda kind, *_: publisher.close(has_left=kind is not None))
        processes, moved = open_peer(str(found.device)), None

        def report(metrics: PeerMetrics) -> None:
            publisher.publish(metrics)
            on_step()

        try:
            processes.from_first(Work(found.folder, plan.batch_size, plan.memory))
            peer = Peer(
                settings,
                dht,
                dataclasses.replace(found.shards, on_notice=on_notice),
                Tokenizer.from_file(found.folder / TOKENIZER),
                folder=found.folder,
                batch_size=plan.batch_size,
                memory=plan.memory,
                on_step=report,
                on_download=on_download,
                on_notice=on_notice,
                processes=processes,
                addresses=found.addresses,
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)  # hivemind ignores it
            on_ready(peer)
            peer.run(partial(end_at_once, on_stop), partial(end_in_time, on_stop))
            moved = peer.watch.moved
        finally:
            processes.from_first(moved)
        return moved


def end_in_time(on_stop: Callable[[], None]) -> None:
    """End this process after LEAVE_S unless it has ended by then."""
    timer = threading.Timer(LEAVE_S, end_at_once, (on_stop, EXIT_CODE))
    timer.daemon = True
    timer.start()


def end_at_once(on_stop: Callable[[], None], code: int = INTERRUPTED) -> NoReturn:
    """End this process and its descendants, even if it waits or a library would catch an exception."""
    end_children()
    # On a thread: the signal may have interrupted the owner of a lock that on_stop needs.
    stopping = threading.Thread(target=on_stop, daemon=True)
    stopping.start()
    stopping.join(ON_STOP_TIMEOUT_S)
    os._exit(code)
