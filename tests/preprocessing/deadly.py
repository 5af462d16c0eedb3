"""Decoding that some keys are the death of, for workers that import it by name."""

import os
import pickle
import signal
from pathlib import Path

from preprocessing.encoding import decode_pool as workers
from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.sources import Sample


class Trap:
    """Touches a file where it is unpickled."""

    def __init__(self, trace: str):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (Path(self.trace),)


class Deadly(Decoding):
    """Pictures named "deadly" end their process, "endless" never comes to an end, "unlucky-FILE" dies once.

    Two take their process over: "trap-FILE" has it answer with a pickle, "flood" with more bytes than any answer has.
    """

    def __call__(self, sample: Sample) -> Candidate | Rejection:
        if sample.key == "deadly":
            os.kill(os.getpid(), signal.SIGSEGV)
        while sample.key == "endless":
            pass
        if sample.key == "flood":
            workers.to_bytes = lambda result: bytes(2**24)
        if sample.key.startswith("trap-"):
            workers.to_bytes = lambda result: pickle.dumps(Trap(sample.key.removeprefix("trap-")))
        if sample.key.startswith("unlucky-"):
            trace = Path(sample.key.removeprefix("unlucky-"))
            if not trace.exists():
                trace.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(sample)
