"""How often each peer may call, and how many streams it may hold open; whoever calls, memory stays bounded."""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from training.swarm.admission.passes import Refused

CALLS_PER_S, CALLS_AT_ONCE = 100.0, 1000.0
"""Of one peer to one process of another; honest peers make some tens a second while they look for a group."""
STRANGE_CALLS_PER_S, STRANGE_CALLS_AT_ONCE = 50.0, 300.0
"""Of all peers together that have shown no pass; of what everybody may call."""
MAX_STREAMS = 32
"""Of one peer; an honest one has a few."""
MAX_STRANGE_STREAMS = 256
"""Of all peers together that are about to show their first pass."""
MAX_REMEMBERED = 4096


class TokenBucket:
    """Lets `rate_per_s` through, and up to `burst` at once after a pause."""

    def __init__(self, rate_per_s: float, burst: float):
        self.rate_per_s, self.burst = rate_per_s, burst
        self.tokens, self.filled_s = burst, time.monotonic()

    def take(self) -> bool:
        """Whether one more may pass now."""
        now_s = time.monotonic()
        self.tokens = min(self.burst, self.tokens + (now_s - self.filled_s) * self.rate_per_s)
        self.filled_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Buckets:
    """A bucket for each caller; of more than MAX_REMEMBERED, those that called least recently begin with a full one."""

    def __init__(self, rate_per_s: float, burst: float):
        self.rate_per_s, self.burst = rate_per_s, burst
        self.buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count a call; Refused if the caller makes too many."""
        bucket = self.buckets.get(caller)
        if bucket is None:
            bucket = self.buckets[caller] = TokenBucket(self.rate_per_s, self.burst)
        self.buckets.move_to_end(caller)
        if len(self.buckets) > MAX_REMEMBERED:
            self.buckets.popitem(last=False)
        if not bucket.take():
            raise Refused("busy")


class Limits:
    """What one process lets peers do."""

    def __init__(self) -> None:
        self.calls = Buckets(CALLS_PER_S, CALLS_AT_ONCE)
        self.strangers = TokenBucket(STRANGE_CALLS_PER_S, STRANGE_CALLS_AT_ONCE)
        self.streams: Counter[str] = Counter()
        self.strange_streams = 0

    def count_call(self, peer: str, *, known: bool) -> None:
        """Refused if this peer, or all strangers together, make too many calls."""
        if not known and not self.strangers.take():
            raise Refused("busy")
        self.calls.take(peer)

    @contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """While the peer has one more stream open; Refused if these are too many."""
        if self.streams[peer] >= MAX_STREAMS:
            raise Refused("busy")
        self.streams[peer] += 1
        try:
            yield
        finally:
            self.streams[peer] -= 1
            if not self.streams[peer]:
                del self.streams[peer]

    @contextmanager
    def handshake(self, *, known: bool) -> Iterator[None]:
        """While a peer shows its pass; Refused if too many strangers are about to."""
        if known:
            yield
            return
        if self.strange_streams >= MAX_STRANGE_STREAMS:
            raise Refused("busy")
        self.strange_streams += 1
        try:
            yield
        finally:
            self.strange_streams -= 1
