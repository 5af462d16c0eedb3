"""What a reducer saw for itself: whose gradients it averaged into steps, of how many samples, over how long."""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.io.files import parse, read_text, write_json

MOST_PEERS = 2048
"""Those with the fewest samples are dropped: anybody can make up identities."""
MOST_STEP_S = 3600.0
"""A longer pause between two steps is not all computing."""


@dataclass(frozen=True)
class Credit:
    """A peer's gradients that were averaged into steps."""

    samples: float = 0.0
    seconds: float = 0.0
    """From step to step, over all steps that it took part in one after the other."""
    samples_per_s: float = 0.0
    """Of its latest step, over the time since its step before; 0 if that was longer ago than MOST_STEP_S."""
    time: float = 0.0
    """Of its latest step, in seconds since 1970."""

    def __post_init__(self) -> None:
        if not all(type(value) in (int, float) and 0 <= value < math.inf for value in vars(self).values()):
            raise UserError(f"{self}: must be numbers of at least 0")


class Attestation:
    """Keeps the credits of one reducer in the file `path`, over restarts."""

    def __init__(self, path: Path):
        self.path = path
        self.credits = parse_credits(read_text(path)) if path.exists() else {}
        self.last_step_s: float | None = None
        self.last_peers: frozenset[str] = frozenset()

    def add(self, samples: Mapping[str, float]) -> None:
        """A step was averaged of so many samples by peer id; writes the file."""
        now = time.time()
        seconds = 0.0 if self.last_step_s is None else min(max(0.0, now - self.last_step_s), MOST_STEP_S)
        for peer, count in samples.items():
            before = self.credits.get(peer, Credit())
            own_s = seconds if peer in self.last_peers else 0.0
            since_s = now - before.time  # it may have missed steps between
            rate = count / since_s if 0 < since_s <= MOST_STEP_S else 0.0
            self.credits[peer] = Credit(before.samples + count, before.seconds + own_s, rate, now)
        self.last_step_s, self.last_peers = now, frozenset(samples)
        self.credits = dict(sorted(self.credits.items(), key=lambda item: -item[1].samples)[:MOST_PEERS])
        try:
            write_json(self.path, {peer: asdict(credit) for peer, credit in self.credits.items()})
        except OSError as error:  # a full disk must not end the round
            logging.getLogger("hivemind").warning(f"{self.path} could not be written: {error}")


def parse_credits(text: str) -> dict[str, Credit]:
    """The credits by peer id in an Attestation's file; ValueError if it is not one."""
    content = parse(json.loads, text, "credits that are not JSON")
    try:
        return {str(peer): Credit(**values) for peer, values in list(content.items())[:MOST_PEERS]}
    except (AttributeError, TypeError) as error:
        raise UserError(f"credits that make no sense: {error}") from None
