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


class TokenBucket:
    """Allows `rate_per_s` calls per second, and up to `burst` at once after a pause."""

    def __init__(self, rate_per_s: float, burst: float):
        self.rate_per_s, self.burst = rate_per_s, burst
        self.tokens, self.filled_s = burst, time.monotonic()

    def take(self) -> bool:
        """Whether one more call is allowed now."""
        now_s = time.monotonic()
        self.tokens = min(self.burst, self.tokens + (now_s - self.filled_s) * self.rate_per_s)
        self.filled_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Buckets:
    """One bucket per caller; beyond MAX_REMEMBERED, the least recent callers start over with a full one."""

    def __init__(self, rate_per_s: float, burst: float):
        self.rate_per_s, self.burst = rate_per_s, burst
        self.buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count a call; Refused if the caller exceeds its rate."""
        bucket = self.buckets.get(caller)
        if bucket is None:
            bucket = self.buckets[caller] = TokenBucket(self.rate_per_s, self.burst)
        self.buckets.move_to_end(caller)
        if len(self.buckets) > MAX_REMEMBERED:
            self.buckets.popitem(last=False)
        if not bucket.take():
            raise Refused("busy")


class Limits:
    """The limits of one process on its callers."""

    def __init__(self) -> None:
        self.calls = Buckets(CALLS_PER_S, CALLS_AT_ONCE)
        self.newcomers = TokenBucket(NEWCOMER_CALLS_PER_S, NEWCOMER_CALLS_AT_ONCE)
        self.streams: Counter[str] = Counter()
        self.handshakes: Counter[str] = Counter()

    def count_call(self, peer: str, *, known: bool) -> None:
        """Refused if this peer, or all peers without a pass together, exceed their rate."""
        if not known and not self.newcomers.take():
            raise Refused("busy")
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
