"""Notices when a run is over, or continues under another run id: with other settings, or after a rollback."""

import threading
from collections.abc import Callable, Sequence

import hivemind

from dalle_lean.errors import is_whole
from training.swarm.config import SwarmSettings
from training.swarm.host_peers import host_peers
from training.swarm.network.bootstrap_service import Unanswered, fetch_settings
from training.swarm.network.owner_keys import records_by_owner

WATCH_INTERVAL_S = 20.0
END_INTERVAL_S = 3.0
LOOKUP_TIMEOUT_S = 20.0


class RunWatch:
    """Asks the helpers at `addresses` every WATCH_INTERVAL_S whether the run still has these settings, and the DHT
    every END_INTERVAL_S whether it is over.

    Args:
        on_over: called every END_INTERVAL_S once the run is over, on a thread.
    """

    def __init__(
        self,
        dht: hivemind.DHT,
        settings: SwarmSettings,
        addresses: Sequence[str],
        on_over: Callable[[], None] = lambda: None,
    ):
        self.dht, self.settings, self.addresses, self.on_over = dht, settings, addresses, on_over
        self.moved: str | None = None  # why this peer must leave or rejoin, in one sentence; None while it need not
        self.over = False
        """Whether a donor has the last step. The optimizer's tracker cannot tell during a round: it pauses then."""
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="run watch", daemon=True)
        self.thread.start()
        threading.Thread(target=self.watch_end, name="run end watch", daemon=True).start()

    def watch(self) -> None:
        while self.moved is None and not self.closed.wait(WATCH_INTERVAL_S):
            self.moved = self.news()

    def watch_end(self) -> None:
        while not self.closed.wait(END_INTERVAL_S):
            self.over = self.over or self.donors_step() >= self.settings.last_epoch
            if self.over and not self.closed.is_set():
                self.on_over()

    def donors_step(self) -> int:
        """The step that the donors report in the DHT, which only they can sign; -1 if none is found there."""
        try:
            found = self.dht.get(f"{self.settings.run_id}_progress", latest=True, return_future=True)
            records = records_by_owner(found.result(timeout=LOOKUP_TIMEOUT_S))
        except OSError:  # a TimeoutError, or the node has been shut down
            return -1
        donors = host_peers(self.settings.swarm).donors
        reports = [entry.value for peer, entry in records.items() if peer in donors and isinstance(entry.value, dict)]
        return max((report["epoch"] for report in reports if is_whole(report.get("epoch"))), default=-1)

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
