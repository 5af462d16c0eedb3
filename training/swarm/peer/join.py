"""A volunteer's part in a run: from what the checks found to the last goodbye."""

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hivemind
import torch
from hivemind.utils import get_dht_time

from dalle_lean.ending import EXIT_CODE
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import find_shards
from training.data.remote_io import silent
from training.run.folder import remove_leftovers, run_folder
from training.run.progress import OnNotice
from training.run.recipe import MemoryRecipe
from training.swarm.config import SwarmSettings, read_settings
from training.swarm.network import dht as network
from training.swarm.network.bootstrap_service import TOKENIZER, RunWatch
from training.swarm.network.orphan_reaper import end_children
from training.swarm.observe.peer_metrics import Publisher
from training.swarm.peer.data_parallel import open_ranks
from training.swarm.peer.gradient_worker import build_model
from training.swarm.peer.rank_worker import RankWorker
from training.swarm.peer.status_line import PeerStatus
from training.swarm.peer.trainer import Contribution, Peer
from training.swarm.preflight.batch_size import Fit, measured
from training.swarm.preflight.checks import codes_of
from training.swarm.preflight.survey import Findings, Options, listen_on, ranks_here

IDENTITY, LOG = "identity", "log"
NO_MORE = "no more"
"""What the other processes hear in place of the next work."""
INTERRUPTED = 130
STOP_WORDS_S = 1.0
GOODBYE_S = 8.0
"""After SIGTERM: some send SIGKILL ten seconds later."""
OnDownload = Callable[[int, int, str], None]


class Volunteer(Peer):
    """A peer that a person watches and ends."""

    def __init__(self, settings: SwarmSettings, dht: hivemind.DHT, *arguments: Any, **options: Any):
        super().__init__(settings, dht, *arguments, **options)
        self.first_epoch: int | None = None
        self.watch = RunWatch(dht, settings)

    @property
    def finished(self) -> bool:
        return self.watch.moved is not None or super().finished

    def leave(self) -> None:
        """Say goodbye, unless Ctrl+C is pressed meanwhile."""
        signal.signal(signal.SIGINT, lambda *_: self.end_at_once())
        self.watch.close()
        super().leave()

    def standing(self) -> PeerStatus:
        """Now; may be asked for at any time by another thread."""
        tracker, settings = self.optimizer.tracker, self.settings
        world, step = tracker.global_progress, self.optimizer.local_epoch
        if self.first_epoch is None and self.done.samples:
            self.first_epoch = step
        target = settings.target_batch_size
        brought = (step - self.first_epoch) * target + world.samples_accumulated if self.first_epoch is not None else 0
        return PeerStatus(
            step=step * settings.steps_per_epoch,
            total_steps=settings.total_steps,
            samples=world.samples_accumulated,
            target=target,
            left_s=max(0.0, world.eta_next_epoch - get_dht_time()),
            trainers=max(tracker.trainers, 1 if self.done.samples else 0),
            samples_per_s=tracker.local_progress.samples_per_second if self.done.samples else 0.0,
            own_samples=self.done.samples,
            own_share=min(1.0, self.done.samples / max(brought, self.done.samples, 1)),
            loss=self.done.loss,
            solo_steps=self.done.solo_steps,
        )


def measure(found: Findings, options: Options) -> Fit:
    """The batch for this machine."""
    assert found.run is not None
    assert found.fit is not None
    settings = found.run.settings
    chosen = options.batch_size is not None or settings.wire.mode == "diloco"
    fit = measured(settings, found.fit, build_model(settings).to(found.device), chosen=chosen, ranks=ranks_here())
    if found.device.type == "cuda":
        torch.cuda.empty_cache()
    return fit


def take_part(
    found: Findings,
    options: Options,
    fit: Fit,
    *,
    on_ready: Callable[[Volunteer], None],
    on_step: Callable[[Peer, Contribution], None],
    on_download: OnDownload | None = None,
    on_notice: OnNotice = silent,
    on_stop: Callable[[], None] = lambda: None,
) -> str | None:
    """Train until the run ends, or Ctrl+C or SIGTERM; returns a sentence where it goes on without peers like this one.

    Args:
        on_ready: gets the peer before it begins.
        on_stop: called before this process ends at once, upon the second Ctrl+C or GOODBYE_S after SIGTERM.

    Raises:
        OutOfSync, Unreachable: see Peer, training.data.remote_io.
        ValueError: nobody of the swarm is to be reached any more; another process takes part from the same folder.
        KeyboardInterrupt, Terminated: upon Ctrl+C or SIGTERM, after goodbye.
    """
    assert found.run is not None
    assert found.folder is not None
    assert found.shards is not None
    # Helpers are asked where they were found: a run may not know how it is reached from here.
    section = dataclasses.replace(found.run.settings.swarm, addresses=found.addresses)
    settings = dataclasses.replace(found.run.settings, swarm=section)
    with run_folder(found.folder):
        remove_leftovers(found.folder)
        network.log_to(found.folder / LOG)
        found.run.write(found.folder)
        dht = network.open_dht(
            found.addresses,
            client_mode=not found.port,
            listen=listen_on(found.port),
            announce=options.announce,
            identity=found.folder / IDENTITY,
        )
        publisher, ranks, goes_on = None, None, False
        try:
            publisher = Publisher(dht, settings.run_id, identity=found.folder / IDENTITY, user=options.user)
            ranks = open_ranks(found.device.type)
            if ranks is not None:
                ranks.share_text(json.dumps(share_of_work(found, fit)))
            peer = Volunteer(
                settings,
                dht,
                dataclasses.replace(found.shards, on_notice=on_notice),
                Tokenizer.from_file(found.folder / TOKENIZER),
                folder=found.folder,
                batch_size=fit.batch_size,
                memory=fit.memory,
                device=str(found.device if ranks is None else ranks.device),
                on_step=told_by(publisher, on_step),
                on_download=on_download,
                on_notice=on_notice,
                ranks=ranks,
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)  # hivemind has it ignored
            peer.end_at_once = partial(end_at_once, on_stop)
            peer.on_terminate = partial(end_in_time, on_stop)
            on_ready(peer)
            peer.go()
            goes_on = peer.watch.moved is not None
            return peer.watch.moved
        finally:
            if ranks is not None and not goes_on:
                ranks.share_text(NO_MORE)
            if publisher is not None:
                publisher.close()
            dht.shutdown()
            signal.signal(signal.SIGINT, signal.default_int_handler)


def told_by(
    publisher: Publisher, on_step: Callable[[Peer, Contribution], None]
) -> Callable[[Peer, Contribution], None]:
    """Both are called."""

    def tell(peer: Peer, done: Contribution) -> None:
        publisher(peer, done)
        on_step(peer, done)

    return tell


def end_in_time(on_stop: Callable[[], None]) -> None:
    """End this process by and by, if it has not said goodbye until then."""
    timer = threading.Timer(GOODBYE_S, end_at_once, (on_stop, EXIT_CODE))
    timer.daemon = True
    timer.start()


def end_at_once(on_stop: Callable[[], None], code: int = INTERRUPTED) -> NoReturn:
    """End this process and all that it has started, whatever it waits for and whoever would catch an exception."""
    end_children()
    telling = threading.Thread(target=on_stop, daemon=True)  # the signal may have stopped who holds the screen
    telling.start()
    telling.join(STOP_WORDS_S)
    os._exit(code)


def share_of_work(found: Findings, fit: Fit) -> dict[str, Any]:
    """What the other processes of a peer with several GPUs need to know."""
    assert found.shards is not None
    memory = dataclasses.asdict(fit.memory)
    return {"folder": str(found.folder), "data": found.shards.name, "batch_size": fit.batch_size, "memory": memory}


def follow(device: str) -> None:
    """Be one of these other processes, until the first one joins no more."""
    ranks = open_ranks(device)
    assert ranks is not None
    while (text := ranks.share_text(None)) != NO_MORE:
        work = json.loads(text)
        folder = Path(work["folder"])
        settings = read_settings(folder)
        RankWorker(
            settings,
            find_shards(work["data"], codes=codes_of(settings)),
            Tokenizer.from_file(folder / TOKENIZER),
            folder=folder,
            batch_size=work["batch_size"],
            memory=MemoryRecipe(**work["memory"]),
            ranks=ranks,
        ).go()
    ranks.close()
