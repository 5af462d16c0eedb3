"""A volunteer's part in a run: from what the checks found to the last goodbye."""

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hivemind
import psutil
import torch
import torch._dynamo  # takes so long that a peer would miss its first round
from hivemind.utils import get_dht_time

from dalle_lean.tokenizer import Tokenizer
from training.progress import OnNotice
from training.retry import silent
from training.run_folder import remove_leftovers, run_folder
from training.swarm import network
from training.swarm.fit import Fit, given_batch_size, measured
from training.swarm.offer import TOKENIZER, fetch_settings
from training.swarm.peer import Contribution, Peer, build_model
from training.swarm.records import Publisher
from training.swarm.settings import SwarmSettings
from training.swarm.standing import Standing
from training.swarm.survey import Findings, Options, first_answer, listen_on

IDENTITY, LOG = "identity", "log"
MOVE_INTERVAL_S = 60.0
"""Between two questions to the helpers whether the run goes on under another run id, as after a rollback."""
OnDownload = Callable[[int, int, str], None]


def prepare_processes() -> None:
    """First of all: nothing that is started later outlives this process, or waits for threads that a fork loses."""
    network.guard_children()
    # OpenMP's threads are not there in a forked process, which would wait for them for ever in its first sum.
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


class Volunteer(Peer):
    """A peer that a person watches and ends."""

    def __init__(self, settings: SwarmSettings, dht: hivemind.DHT, *arguments: Any, **options: Any):
        super().__init__(settings, dht, *arguments, **options)
        self.first_epoch: int | None = None
        self.moved = False
        """Whether the run goes on elsewhere."""
        self.ended = False
        """Whether the training came to an end of its own, or upon the first Ctrl+C."""
        self.left = False
        """Whether the others were told goodbye."""

    @property
    def finished(self) -> bool:
        return self.moved or super().finished

    def watch_for_moves(self, addresses: Sequence[str], stop: threading.Event) -> None:
        """Ask the helpers now and then, until `stop` is set; of a run that has moved on nothing more is trained."""
        while not self.moved and not stop.wait(MOVE_INTERVAL_S):
            theirs = first_answer(self.dht, addresses, fetch_settings)
            self.moved = theirs is not None and theirs.run_id != self.settings.run_id

    def learn(self, interrupted: Callable[[], bool]) -> None:
        super().learn(interrupted)
        self.ended = True

    def show_download(self, received: int, total: int, donor: str) -> None:
        self.ended = self.ended or self.interrupted()  # it ends the training then
        super().show_download(received, total, donor)

    def leave(self) -> None:
        """Say goodbye; upon the second Ctrl+C, the only one that breaks into the training, there is no time for it."""
        if self.ended or not isinstance(sys.exception(), KeyboardInterrupt):
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
    chosen = given_batch_size(settings, options.batch_size) is not None
    fit = measured(settings, found.fit, build_model(settings).to(found.device), chosen=chosen)
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
) -> bool:
    """Train until the run ends, or Ctrl+C; returns whether the run goes on under another run id.

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
        publisher = Publisher(dht, found.run.settings.run_id, identity=found.folder / IDENTITY, user=options.user)
        stop = threading.Event()

        def tell(peer: Peer, done: Contribution) -> None:
            publisher(peer, done)
            on_step(peer, done)

        peer: Volunteer | None = None
        try:
            peer = Volunteer(
                found.run.settings,
                dht,
                dataclasses.replace(found.shards, on_notice=on_notice),
                Tokenizer.from_file(found.folder / TOKENIZER),
                folder=found.folder,
                batch_size=fit.batch_size,
                memory=fit.memory,
                device=str(found.device),
                on_step=tell,
                on_download=on_download,
                on_notice=on_notice,
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)  # hivemind has it ignored
            on_ready(peer)
            threading.Thread(target=peer.watch_for_moves, args=(found.addresses, stop), daemon=True).start()
            peer.go()
            return peer.moved
        finally:
            stop.set()
            if peer is None or peer.left:
                publisher.close()
                dht.shutdown()
            else:
                end_children()


def end_children() -> None:
    """Kill what this process has started and what of it is left."""
    for child in psutil.Process().children(recursive=True):
        network.kill(child)
