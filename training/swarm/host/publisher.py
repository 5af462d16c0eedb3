"""Publishes a run's checkpoints while it trains, on a thread of the supervisor's process."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalle_lean.io.model_card import model_files
from dalle_lean.io.publish import publish
from dalle_lean.progress import OnNotice
from training.swarm.host.checkpoints import newest_checkpoint

POLL_S = 5.0
RETRY_S = 60.0


class CheckpointPublisher:
    """Keeps the newest checkpoint's model folder at a destination; skips those written during an upload.

    Args:
        destination: see dalle_lean.io.publish.
        on_notice: called on the publisher's thread.
    """

    def __init__(self, run_dir: Path, destination: str, on_notice: OnNotice):
        self.run_dir, self.destination, self.on_notice = run_dir, destination, on_notice
        self.published_step = 0
        self.last_error = ""

    def publish_newest(self) -> bool:
        """Publish the newest checkpoint unless it is published; False upon failure. Each error is reported once."""
        newest = newest_checkpoint(self.run_dir)
        if newest is None or newest.step == self.published_step:
            return True
        step, loss = newest.step, newest.heldout_loss
        facts = {
            "run": newest.run,
            "step": f"{step:,}",
            "held-out loss": f"{loss:.4g} nats" if math.isfinite(loss) else "not measured",
        }
        try:
            files = model_files(newest.folder / "model", newest.run.rpartition("-")[0], facts)
            publish(files, self.destination, message=f"Step {step}")
        except (OSError, ValueError) as error:
            if str(error) != self.last_error:
                self.on_notice(f"the checkpoint of step {step} was not published: {error}")
            self.last_error = str(error)
            return False
        self.published_step, self.last_error = step, ""
        return True

    def run(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            stopped.wait(POLL_S if self.publish_newest() else RETRY_S)


@contextmanager
def publishing(run_dir: Path, destination: str | None, on_notice: OnNotice) -> Iterator[None]:
    """Publish during the block and, unless it is interrupted, the last checkpoint after it. Without a destination,
    publish nothing."""
    if not destination:
        yield
        return
    publisher, stopped = CheckpointPublisher(run_dir, destination, on_notice), threading.Event()
    # A daemon, so that Ctrl+C does not wait for gigabytes; the next start resumes the upload.
    thread = threading.Thread(target=publisher.run, args=(stopped,), name="publisher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
    thread.join()
    publisher.last_error = ""
    publisher.publish_newest()
