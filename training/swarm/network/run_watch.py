"""Notices that a run continues elsewhere: with other settings, or rolled back to a checkpoint."""

import threading
from collections.abc import Sequence

import hivemind

from training.swarm.admission.gate import gate_of
from training.swarm.config import SwarmSettings
from training.swarm.network.bootstrap_service import Unanswered, fetch_settings

WATCH_INTERVAL_S = 20.0


class RunWatch:
    """Asks the helpers at these addresses every WATCH_INTERVAL_S whether the run still has these settings."""

    def __init__(self, dht: hivemind.DHT, settings: SwarmSettings, addresses: Sequence[str]):
        self.dht, self.settings, self.addresses = dht, settings, addresses
        self.moved: str | None = None
        """A sentence, once the run goes on without peers like this one, or without this one."""
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="run watch", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        """Until the run has moved or the watch is closed."""
        gate = gate_of(self.dht)
        while self.moved is None and not self.closed.wait(WATCH_INTERVAL_S):
            if gate is not None and (refusal := gate.own_refusal):
                self.moved = refusal
                break
            for address in self.addresses:
                try:
                    current = fetch_settings(self.dht, address)
                except Unanswered:
                    continue  # the other helper may know, and this one is asked again
                except ValueError as error:
                    self.moved = f"the run goes on with settings that this version cannot read: {error}"
                    break
                if current.run_id != self.settings.run_id:
                    self.moved = how_it_moved(self.settings, current)
                    break

    def close(self) -> None:
        """Stop asking, before the node is shut down; does not wait for a call in progress."""
        self.closed.set()


def how_it_moved(before: SwarmSettings, now: SwarmSettings) -> str:
    """What happened to a run, for its volunteers."""
    changes = before.differences(now)
    if changes:
        return f"the run goes on with another {', '.join(changes)}; join it again with the same address"
    return (
        f"the run was taken back to an earlier step and goes on as {now.swarm.name}; join it again with the same "
        "address; the steps after that one are discarded"
    )
