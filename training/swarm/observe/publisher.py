"""Publishes a peer's metrics while it trains."""

import logging
import threading
from importlib.metadata import version
from typing import Any

import hivemind
from hivemind.utils import get_dht_time

from training.swarm.network.owner_keys import owner_key
from training.swarm.observe.peer_metrics import EXPIRATION_S, PeerMetrics, PeerRecord, check_user_name, metrics_key

INTERVAL_S = 30.0
STORE_TIMEOUT_S = 20.0
LEAVE_TIMEOUT_S = 3.0  # to say that this peer leaves, which its user waits for


class Publisher:
    """Publishes this peer's metrics at each step of the swarm and at least every INTERVAL_S, on a thread.

    Args:
        user: display name on the leaderboard; ValueError unless it is a UserName.
    """

    def __init__(self, dht: hivemind.DHT, run_id: str, *, user: str | None = None, role: str = "trainer"):
        if user is not None:
            check_user_name(user)
        self.dht, self.key, self.subkey = dht, metrics_key(run_id), owner_key(dht)
        self.constant = {
            "role": role,
            "client_mode": dht.client_mode,
            "version": version("dalle-lean"),
            "user": user,
            "started": float(get_dht_time()),
        }
        self.latest: dict[str, Any] | None = None
        self.published = 0
        self.due, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.keep_publishing, name="metrics", daemon=True)

    def publish(self, metrics: PeerMetrics) -> None:
        """Take the metrics, which the thread publishes upon a new step or after INTERVAL_S; does not block."""
        before, self.latest = self.latest, {**self.constant, **metrics.record_fields()}
        if before is None:
            self.thread.start()
        if before is None or before["step"] != self.latest["step"]:
            self.due.set()

    def keep_publishing(self) -> None:
        while not self.closed.is_set():
            self.due.wait(INTERVAL_S)
            self.due.clear()
            if not self.closed.is_set():
                self.store()

    def store(self, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Store one record in the DHT."""
        now = get_dht_time()
        stored, reason = False, "no node took it"
        try:
            content = PeerRecord(**{**(self.latest or {}), "time": float(now)}).dict()
            future = self.dht.store(self.key, content, now + EXPIRATION_S, subkey=self.subkey, return_future=True)
            stored = future.result(timeout=timeout_s)
        except Exception as error:  # of any kind: training goes on without metrics
            reason = f"{type(error).__name__}: {error}"
        if stored:
            self.published += 1
        else:
            logging.getLogger("hivemind").warning(f"the metrics were not published: {reason}")

    def close(self, *, has_left: bool = False) -> None:
        """Stop publishing; call it before the DHT is shut down.

        Args:
            has_left: replace the record by one that says so; else it counts until it expires, as that of a peer that
                has done the last step should.
        """
        self.closed.set()
        self.due.set()
        if self.thread.is_alive():
            self.thread.join(timeout=STORE_TIMEOUT_S)
        if has_left and self.latest is not None:
            self.latest = {**self.latest, "role": "left"}
            self.store(LEAVE_TIMEOUT_S)
