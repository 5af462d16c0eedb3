"""Notices when a run continues under another run id: with other settings, or after a rollback."""

import threading
from collections.abc import Sequence

import hivemind

from training.swarm.config import SwarmSettings
from training.swarm.network.bootstrap_service import Unanswered, fetch_settings

WATCH_INTERVAL_S = 20.0


class RunWatch:
    """Asks the helpers at `addresses` every WATCH_INTERVAL_S whether the run still has these settings."""

    def __init__(self, dht: hivemind.DHT, settings: SwarmSettings, addresses: Sequence[str]):
        self.dht, self.settings, self.addresses = dht, settings, addresses
        self.moved: str | None = None  # why this peer must leave or rejoin, in one sentence; None while it need not
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="run watch", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while self.moved is None and not self.closed.wait(WATCH_INTERVAL_S):
            self.moved = self.news()

    def news(self) -> str | None:
        """Ask once; returns the new value of `moved`."""
        gate = self.dht.gate
        if gate is not None and (refusal := gate.own_refusal):
            return str(refusal)
        for address in self.addresses:
            try:
                current = fetch_settings(self.dht, address)
            except Unanswered:
                continue  # another helper may answer, and this one is asked again
            except ValueError as error:
                return f"the run goes on with settings that this version cannot read: {error}"
            if changes := self.settings.differences(current):
                return f"the run goes on with another {', '.join(changes)}; rejoin it with the same address"
            if current.run_id != self.settings.run_id and not is_behind(current, self.settings):
                return (
                    f"the run was rolled back to an earlier step and goes on as {current.swarm.name}, without the "
                    "steps after it; rejoin it with the same address"
                )
        return None

    def close(self) -> None:
        """Stop asking; does not wait for a call in progress. Call it before the node is shut down."""
        self.closed.set()


def is_behind(current: SwarmSettings, known: SwarmSettings) -> bool:
    """Whether these are the settings from before a rollback, which a helper elsewhere serves until it restarts."""
    return not current.differences(known) and current.swarm.rollbacks < known.swarm.rollbacks
