"""Decoding that some keys are the death of, for workers that import it by name."""

import os
import signal
from pathlib import Path

from preprocessing.decoding import Candidate, Decoding, Rejection
from preprocessing.sources import Sample


class Deadly(Decoding):
    """Pictures named "deadly" end their process, "endless" never comes to an end, "unlucky-FILE" dies once."""

    def __call__(self, sample: Sample) -> Candidate | Rejection:
        if sample.key == "deadly":
            os.kill(os.getpid(), signal.SIGSEGV)
        while sample.key == "endless":
            pass
        if sample.key.startswith("unlucky-"):
            trace = Path(sample.key.removeprefix("unlucky-"))
            if not trace.exists():
                trace.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(sample)
