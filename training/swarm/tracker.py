"""How far all peers are together, as each of them counts it."""

import asyncio
from typing import Any

from hivemind.optim.progress_tracker import GlobalTrainingProgress, ProgressTracker
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration


class SwarmTracker(ProgressTracker):
    """Counts the steps of peers in client mode too: hivemind's leaves those behind to themselves who wait for a
    listening trainer to go first."""

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        progress = super()._parse_swarm_progress_data(as_listening(metadata))
        entries = metadata.values() if isinstance(metadata, dict) else ()
        progress.num_clients = sum(entry.value["client_mode"] for entry in entries if entry.value is not None)
        return progress


def as_listening(metadata: Any) -> Any:
    """The same records, none of them in client mode."""
    if not isinstance(metadata, dict):
        return metadata
    return {
        peer: ValueWithExpiration(entry.value and {**entry.value, "client_mode": False}, entry.expiration_time)
        for peer, entry in metadata.items()
    }


class FollowingTracker(SwarmTracker):
    """Tells the others that this peer is there although it brings no samples: hivemind's own tracker keeps silent."""

    async def _progress_reporter(self) -> None:
        said, expires = None, 0.0
        while not self.shutdown_triggered.is_set():
            now = get_dht_time()
            if self.local_progress.epoch != said or now > expires - self.metadata_expiration / 2:
                said, expires = self.local_progress.epoch, now + self.metadata_expiration
                await self.dht.store(
                    key=self.training_progress_key,
                    subkey=self._local_public_key,
                    value=self.local_progress.copy(update={"time": now}).dict(),
                    expiration_time=expires,
                    return_future=True,
                )
            loop = asyncio.get_event_loop()
            await loop.run_in_executor(None, self.should_report_progress.wait, self.metadata_expiration / 4)
            self.should_report_progress.clear()
