"""Detects when a run has diverged, and chooses the checkpoint to roll back to."""

import math
from collections import deque
from collections.abc import Sequence

from training.swarm.host.checkpoints import Checkpoint, is_intact

MAX_RISE = 1.1
"""Largest held-out loss, relative to the least of the latest MEASURED ones; the samples are always the same."""
MEASURED = 10
MAX_ROLLBACKS = 5
"""After these, the host only warns: a run that keeps diverging has another problem than one bad peer."""


class LossGuard:
    """Watches a run's held-out loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=MEASURED)

    def limit(self, loss: float) -> float | None:
        """Check a loss in nats: returns the limit that it exceeds, or None and remembers the loss."""
        limit = MAX_RISE * min(self.losses, default=loss)
        if loss > limit:
            return limit
        if not math.isnan(loss):  # measured
            self.losses.append(loss)
        return None


def last_good(checkpoints: Sequence[Checkpoint], limit: float) -> Checkpoint | None:
    """The newest intact checkpoint whose held-out loss was measured and does not exceed `limit`."""
    good = (checkpoint for checkpoint in reversed(checkpoints) if checkpoint.heldout_loss <= limit)
    return next((checkpoint for checkpoint in good if is_intact(checkpoint.folder)), None)
