"""A reducer's own record of whose gradients it averaged into steps: how many samples, over how long."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.io.files import parse, read_text, write_json

MOST_PEERS = 2048  # the peers with the fewest samples are dropped, since identities are free
MOST_VALUE = 1e15  # of what a helper says: sums of such numbers stay finite
MOST_STEP_S = 3600.0  # cap on the time between two steps: a longer pause was not all spent computing


@dataclass(frozen=True)
class Credit:
    """The contribution of a peer whose gradients were averaged into steps."""

    samples: float = 0.0
    seconds: float = 0.0
    """Between consecutive steps that it took part in, summed."""
    samples_per_s: float = 0.0
    """The samples of its latest step over the time since its previous one; 0 if that is more than MOST_STEP_S."""
    time: float = 0.0
    """When it took its latest step, in seconds since 1970."""
    counted_samples: float = 0.0
    """Of the samples, those that this reducer counts for all: one reducer does in each step, so that they add up."""

    def __post_init__(self) -> None:
        if not all(type(value) in (int, float) and 0 <= value <= MOST_VALUE for value in vars(self).values()):
            raise UserError(f"{self}: must be numbers from 0 to {MOST_VALUE:g}")


class Attestation:
    """Keeps the credits that one reducer gives in the file `path`, across restarts."""

    def __init__(self, path: Path):
        self.path = path
        self.credits = parse_credits(read_text(path)) if path.exists() else {}
        self.last_step_s: float | None = None
        self.last_peers: frozenset[str] = frozenset()

    def add(self, samples: Mapping[str, float], counts: bool = True) -> None:
        """Credit a step's samples, by peer id, and write the file.

        counts: whether this reducer, of those that average the step, is the one that counts its samples for all.
        """
        now = time.time()
        seconds = 0.0 if self.last_step_s is None else min(max(0.0, now - self.last_step_s), MOST_STEP_S)
        for peer, count in samples.items():
            before = self.credits.get(peer, Credit())
            own_s = seconds if peer in self.last_peers else 0.0
            since_s = now - before.time  # it may have missed steps in between
            rate = count / since_s if 0 < since_s <= MOST_STEP_S else 0.0
            counted = before.counted_samples + (count if counts else 0.0)
            self.credits[peer] = Credit(before.samples + count, before.seconds + own_s, rate, now, counted)
        self.last_step_s, self.last_peers = now, frozenset(samples)
        self.credits = dict(sorted(self.credits.items(), key=lambda item: -item[1].samples)[:MOST_PEERS])
        try:
            write_json(self.path, {peer: asdict(credit) for peer, credit in self.credits.items()})
        except OSError as error:  # a full disk must not end the round
            logging.getLogger("hivemind").warning(f"{self.path} could not be written: {error}")


def merge(credits: Sequence[Credit]) -> Credit:
    """A peer's credit from those of several reducers; no step counts twice.

    Samples are the sum of the `counted_samples`, but at least those of the reducer that averaged most: a file from
    before reducers counted for all has none. Seconds are of the reducer that measured most, the speed of the latest.
    """
    latest = max(credits, key=lambda credit: credit.time)
    counted = sum(credit.counted_samples for credit in credits)
    return replace(
        latest,
        samples=max(counted, *(credit.samples for credit in credits)),
        seconds=max(credit.seconds for credit in credits),
        counted_samples=counted,
    )


def parse_credits(text: str) -> dict[str, Credit]:
    """Credits by peer id, from an Attestation's file; ValueError if it is malformed.

    Fields of a later version are ignored.
    """
    content = parse(json.loads, text, "the credits are not JSON")
    known = [spec.name for spec in fields(Credit)]
    try:
        return {
            str(peer): Credit(**{name: values[name] for name in known if name in values})
            for peer, values in list(content.items())[:MOST_PEERS]
        }
    except (AttributeError, TypeError) as error:
        raise UserError(f"the credits are malformed: {error}") from None
