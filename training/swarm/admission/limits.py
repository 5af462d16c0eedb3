"""Rate limits: how often each peer may call and how many streams it may hold open. They also bound memory."""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from training.swarm.admission.passes import Refused

CALLS_PER_S, CALLS_AT_ONCE = 100.0, 1000.0
"""From one peer to one process of another; honest peers make some tens per second during matchmaking."""
NEWCOMER_CALLS_PER_S, NEWCOMER_CALLS_AT_ONCE = 50.0, 300.0
"""From all peers without a pass together, to the methods that are open to them."""
MAX_STREAMS = 32  # per peer; an honest one has a few
MAX_HANDSHAKES = 256  # at once, of all peers together that have not shown a pass yet
MAX_REMEMBERED = 4096


class Buckets:
    """Token buckets: each caller may make `rate_per_s` calls per second, and up to `burst` at once after a pause.

    Beyond MAX_REMEMBERED, the least recent callers start over with a full bucket.
    """

    def __init__(self, rate_per_s: float, burst: float):
        self.rate_per_s, self.burst = rate_per_s, burst
        self.left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by caller: calls allowed, at which time

    def take(self, caller: str) -> None:
        """Count a call; Refused if the caller exceeds its rate."""
        now_s = time.monotonic()
        calls, then_s = self.left.pop(caller, (self.burst, now_s))
        calls = min(self.burst, calls + (now_s - then_s) * self.rate_per_s)
        self.left[caller] = (calls - 1 if calls >= 1 else calls), now_s
        if len(self.left) > MAX_REMEMBERED:
            self.left.popitem(last=False)
        if calls < 1:
            raise Refused("busy")


class Limits:
    """The limits of one process on its callers."""

    def __init__(self) -> None:
        self.calls = Buckets(CALLS_PER_S, CALLS_AT_ONCE)
        self.newcomers = Buckets(NEWCOMER_CALLS_PER_S, NEWCOMER_CALLS_AT_ONCE)
        self.streams: Counter[str] = Counter()
        self.handshakes: Counter[str] = Counter()

    def count_call(self, peer: str, *, known: bool) -> None:
        """Refused if this peer, or all peers without a pass together, exceed their rate."""
        if not known:
            self.newcomers.take("")
        self.calls.take(peer)

    def stream(self, peer: str) -> AbstractContextManager[None]:
        """Count a stream of the peer while it is open; Refused beyond MAX_STREAMS."""
        return counted(self.streams, peer, MAX_STREAMS)

    def handshake(self, *, known: bool) -> AbstractContextManager[None]:
        """Count a handshake while a peer shows its pass; Refused if too many newcomers are doing so."""
        return nullcontext() if known else counted(self.handshakes, "newcomers", MAX_HANDSHAKES)


@contextmanager
def counted(counts: Counter[str], key: str, most: int) -> Iterator[None]:
    """Raise a count while the context lasts; Refused beyond `most`."""
    if counts[key] >= most:
        raise Refused("busy")
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
