"""How long drawing takes on this machine: measured at startup, then learned from every drawing."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from inference.batching import default_batch_size
from inference.generator import Generator
from inference.request import Progress, Request, Settings

PAPER_NUM_IMAGES = 128
COUNTS = (8, 16, 32, 64, PAPER_NUM_IMAGES)
PATIENCE_S = 10.0  # the longest that a prompt may take by default if nobody else draws
LONGEST_TURN_S = 2.0
SMALL_BATCH = 8
NEWEST_WEIGHT = 0.2  # of the newest measurement in the moving averages, at least


@dataclass
class LatencyModel:
    """Seconds for a row of codes by the number of pictures drawn together, and for decoding and ranking one picture."""

    rows: int  # of codes in a picture
    row_s: dict[int, float]
    picture_s: float = 0.0
    largest_batch: int = 64
    replicas: int = 1  # of the model, which share a prompt's pictures in units of eight
    rows_learned: int = 0  # how often it has learned; the first time replaces what was measured at startup
    decodings_learned: int = 0

    def learn_row(self, batch: int, seconds: float, guided: bool = False) -> None:
        """Learn that a row of codes of `batch` pictures took `seconds`.

        Also corrects what was measured for other batches, perhaps while the machine was busy: a larger batch takes at
        least as long for a row, but no longer for each picture.
        """
        if guided:
            seconds /= 2
        self.rows_learned += 1
        before = self.row_s.get(batch, seconds)
        learned = before + max(NEWEST_WEIGHT, 1 / self.rows_learned) * (seconds - before)
        for size, other in list(self.row_s.items()):  # threads may add sizes meanwhile
            shortest, longest = sorted((learned, learned * size / batch))
            self.row_s[size] = min(max(other, shortest), longest)
        self.row_s[batch] = learned

    def learn_decoding(self, num_images: int, seconds: float) -> None:
        """Learn that decoding and ranking `num_images` pictures took `seconds`."""
        self.decodings_learned += 1
        weight = max(NEWEST_WEIGHT, 1 / self.decodings_learned)
        self.picture_s += weight * (seconds / num_images - self.picture_s)

    def seconds_per_row(self, batch: int) -> float:
        """Interpolated between the measured batch sizes, proportional above them, constant below them."""
        sizes = sorted(self.row_s)
        if batch > sizes[-1]:
            return self.row_s[sizes[-1]] * batch / sizes[-1]
        return float(np.interp(batch, sizes, [self.row_s[size] for size in sizes]))

    def batch_size(self) -> int:
        """The largest batch that keeps a turn short: 8 to `largest_batch`."""
        batch = SMALL_BATCH
        while batch * 2 <= self.largest_batch and self.seconds_per_row(batch * 2) <= LONGEST_TURN_S:
            batch *= 2
        return batch

    def seconds(self, num_images: int, guided: bool = False) -> float:
        """Seconds for a whole prompt if nobody else draws."""
        if self.replicas > 1:  # the one with the largest share takes longest
            num_images = min(num_images, SMALL_BATCH * -(-num_images // (SMALL_BATCH * self.replicas)))
        batch = self.batch_size()
        whole, rest = divmod(num_images, batch)
        row_s = whole * self.seconds_per_row(batch) + (self.seconds_per_row(rest) if rest else 0.0)
        return row_s * self.rows * (2 if guided else 1) + num_images * self.picture_s

    def affordable(self, guided: bool = False) -> int:
        """How many of the paper's 128 candidates this machine draws in PATIENCE_S: 8 to 128."""
        return max((count for count in COUNTS if self.seconds(count, guided) <= PATIENCE_S), default=COUNTS[0])


def measure(generator: Generator, at_once: int = 1) -> LatencyModel:
    """Time four rows of codes, about 2 s with the bundled model; this also warms up the machine.

    `at_once`: prompts that share the memory.
    """
    config, decoder = generator.model.config, generator.decoder
    largest = default_batch_size(config, decoder.dtype, decoder.device, at_once)
    row_s: dict[int, float] = {}
    for batch in (SMALL_BATCH, largest):
        if row_s and row_s[SMALL_BATCH] > LONGEST_TURN_S:  # a larger batch would take even longer
            break
        row_s[batch] = time_row(generator, batch)
    latency = LatencyModel(config.image_side, row_s, largest_batch=largest)
    if latency.seconds(SMALL_BATCH) <= LONGEST_TURN_S:
        latency.picture_s = time_decoding(generator)
    return latency


def time_row(generator: Generator, batch: int) -> float:
    """Seconds for the second row of codes; the first one is the warm-up."""
    request = Request("a picture", Settings(num_images=batch, best=batch))
    with closing(cast(Any, timed(generator.draw([request], batch)))) as steps:
        next(steps)
        return float(next(steps)[1])


def time_decoding(generator: Generator, num_images: int = 16) -> float:
    """Seconds for decoding and ranking one picture."""
    drawing = generator.draw([Request("a picture", Settings(num_images=num_images, best=num_images))])
    return sum(seconds for progress, seconds in timed(drawing) if progress.codes is None) / num_images


def timed(drawing: Iterator[Progress]) -> Iterator[tuple[Progress, float]]:
    """The steps of a drawing, each with the seconds until the device had computed it. Closing it closes the drawing."""
    with closing(cast(Any, drawing)):
        started_s = time.perf_counter()
        for progress in drawing:
            if progress.codes is not None:
                progress.codes[0, -1].item()  # waits for the device
            yield progress, time.perf_counter() - started_s
            started_s = time.perf_counter()
