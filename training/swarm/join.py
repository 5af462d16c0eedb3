"""A volunteer's part in a run: from what the checks found to the last goodbye."""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hivemind
import psutil
import torch
from hivemind.utils import get_dht_time

from dalle_lean.tokenizer import Tokenizer
from training.progress import OnNotice
from training.recipe import MemoryRecipe
from training.retry import silent
from training.run_folder import remove_leftovers, run_folder
from training.shard_set import find_shards
from training.swarm import network
from training.swarm.checks import codes_of
from training.swarm.fit import Fit, measured
from training.swarm.follower import Follower
from training.swarm.offer import TOKENIZER, RunWatch
from training.swarm.peer import Contribution, Peer, build_model
from training.swarm.ranks import open_ranks
from training.swarm.records import Publisher
from training.swarm.settings import SwarmSettings, read_settings
from training.swarm.standing import Standing
from training.swarm.survey import Findings, Options, listen_on, ranks_here

IDENTITY, LOG = "identity", "log"
OnDownload = Callable[[int, int, str], None]


class Volunteer(Peer):
    """A peer that a person watches and ends."""

    def __init__(self, settings: SwarmSettings, dht: hivemind.DHT, *arguments: Any, **options: Any):
        super().__init__(settings, dht, *arguments, **options)
        self.first_epoch: int | None = None
        self.watch = RunWatch(dht, settings)
        self.ended = False
        """Whether the training came to an end of its own, or upon the first Ctrl+C."""
        self.left = False
        """Whether the others were told goodbye."""

    @property
    def finished(self) -> bool:
        return self.watch.moved is not None or super().finished

    def learn(self, interrupted: Callable[[], bool]) -> None:
        super().learn(interrupted)
        self.ended = True

    def show_download(self, received: int, total: int, donor: str) -> None:
        self.ended = self.ended or self.interrupted()  # it ends the training then
        super().show_download(received, total, donor)

    def leave(self) -> None:
        """Say goodbye; upon the second Ctrl+C, the only one that breaks into the training, there is no time for it."""
        if self.ended or not isinstance(sys.exception(), KeyboardInterrupt):
            self.watch.close()
            super().leave()
            self.left = True

    def standing(self) -> Standing:
        """Now; may be asked for at any time by another thread."""
        tracker, settings = self.optimizer.tracker, self.settings
        world, step = tracker.global_progress, self.optimizer.local_epoch
        if self.first_epoch is None and self.done.samples:
            self.first_epoch = step
        target = settings.target_batch_size
        brought = (step - self.first_epoch) * target + world.samples_accumulated if self.first_epoch is not None else 0
        return Standing(
            step=step * settings.steps_per_epoch,
            total_steps=settings.total_steps,
            samples=world.samples_accumulated,
            target=target,
            left_s=max(0.0, world.eta_next_epoch - get_dht_time()),
            peers=world.num_peers,
            samples_per_s=tracker.local_progress.samples_per_second if self.done.samples else 0.0,
            own_samples=self.done.samples,
            own_share=min(1.0, self.done.samples / max(brought, self.done.samples, 1)),
            loss=self.done.loss,
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
) -> str | None:
    """Train until the run ends, or Ctrl+C; returns a sentence where the run goes on without peers like this one.

    Args:
        on_ready: gets the peer before it begins.

    Raises:
        OutOfSync, Unreachable: see Peer, training.retry.
        ValueError: nobody of the swarm is to be reached any more; another process takes part from the same folder.
        KeyboardInterrupt: after goodbye, or at once the second time.
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
        publisher = Publisher(dht, settings.run_id, identity=found.folder / IDENTITY, user=options.user)

        def tell(peer: Peer, done: Contribution) -> None:
            publisher(peer, done)
            on_step(peer, done)

        peer: Volunteer | None = None
        try:
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
                on_step=tell,
                on_download=on_download,
                on_notice=on_notice,
                ranks=ranks,
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)  # hivemind has it ignored
            on_ready(peer)
            peer.go()
            return peer.watch.moved
        finally:
            if peer is None or peer.left:
                publisher.close()
                dht.shutdown()
            else:
                end_children()


def share_of_work(found: Findings, fit: Fit) -> dict[str, Any]:
    """What the other processes of a peer with several GPUs need to know."""
    assert found.shards is not None
    memory = dataclasses.asdict(fit.memory)
    return {"folder": str(found.folder), "data": found.shards.name, "batch_size": fit.batch_size, "memory": memory}


def follow(device: str) -> None:
    """Be one of these other processes, until the first one has left."""
    ranks = open_ranks(device)
    assert ranks is not None
    work = json.loads(ranks.share_text(None))
    folder = Path(work["folder"])
    settings = read_settings(folder)
    Follower(
        settings,
        find_shards(work["data"], codes=codes_of(settings)),
        Tokenizer.from_file(folder / TOKENIZER),
        folder=folder,
        batch_size=work["batch_size"],
        memory=MemoryRecipe(**work["memory"]),
        ranks=ranks,
    ).go()
    ranks.close()


def end_children() -> None:
    """Kill what this process has started and what of it is left."""
    for child in psutil.Process().children(recursive=True):
        network.kill(child)
