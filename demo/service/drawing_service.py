"""One generator shared by several users: what happens to a prompt from its arrival to its pictures.

The prompt page and its endpoint both present these events.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dalle_lean.errors import DEFAULT_GUIDANCE_RANGE, UserError
from dalle_lean.images.files import MAX_PICTURE_BYTES, UnusablePicture, open_picture, square_pixels
from demo.service.latency_model import LatencyModel, measure, timed
from demo.service.scheduler import Scheduler, Ticket
from inference.generator import Generator
from inference.request import DEFAULT_BEST, Picture, Progress, Request

MAX_UPLOAD_BYTES = MAX_PICTURE_BYTES // 4
UPLOADS_WAITING = 3
FIRST_UPLOAD_S = 1.0
# How often the place in the queue is reported, and the least time between two previews.
LINE_INTERVAL_S = 0.5
PREVIEW_INTERVAL_S = 0.3
PREVIEWS = 4
LACK_OF_MEMORY = "Drawing failed because this machine lacks memory; try fewer candidates."
LOWEST_GUIDANCE, HIGHEST_GUIDANCE = DEFAULT_GUIDANCE_RANGE


@dataclass(frozen=True)
class Queued:
    line: int  # place in the queue; 1 is next
    seconds: float  # estimated, until its turn comes


@dataclass(frozen=True)
class Running:
    """Being drawn, in turns with others."""

    note: str
    share: float  # of the codes, 0..1
    seconds: float  # estimated, until it is done
    others: int  # other prompts being drawn at the same time
    previews: list[Image.Image] = field(default_factory=list)
    """The first few pictures, transparent where not drawn yet; empty if unchanged."""


@dataclass(frozen=True)
class Done:
    request: Request
    pictures: list[Picture]  # best first
    seconds: float  # since it left the queue
    described: dict[str, Any]  # what determines the pictures besides the prompt, as `Generator.describe` gives it


DrawingEvent = Queued | Running | Done


class DrawingService:
    """Draws for several users at once. Measures how fast it draws, unless `latency` is given."""

    def __init__(self, generator: Generator, latency: LatencyModel | None = None, scheduler: Scheduler | None = None):
        self.generator = generator
        self.scheduler = Scheduler() if scheduler is None else scheduler
        self.uploads = Scheduler(at_once=1, waiting=UPLOADS_WAITING)
        self.upload_s = FIRST_UPLOAD_S  # seconds that the last upload took
        self.latency = latency or self.scheduler.run(lambda: measure(generator, self.scheduler.at_once))

    @classmethod
    def load(cls, make_generator: Callable[[], Generator]) -> Self:
        """A service whose generator is made on the thread that will draw.

        If a second thread computes too, OpenMP counts more threads than cores. They then sleep between operations
        instead of spinning, and drawing takes twice as long.
        """
        scheduler = Scheduler()
        return cls(scheduler.run(make_generator), scheduler=scheduler)

    @property
    def guidance(self) -> float:
        """The model's default, within the page's range."""
        return min(max(self.generator.guidance, LOWEST_GUIDANCE), HIGHEST_GUIDANCE)

    def seconds(self, num_images: int, guidance: float | None = None) -> float:
        """Seconds for a prompt if nobody else draws; `guidance` None is the model's default."""
        return self.latency.seconds(num_images, (self.guidance if guidance is None else guidance) != 1)

    def affordable(self) -> int:
        """The default number of candidates."""
        return self.latency.affordable(self.guidance != 1)

    def default_drawn(self) -> int:
        """The default number of pictures that are drawn: without a ranking, those that are shown."""
        return DEFAULT_BEST if self.generator.scorer is None else self.affordable()

    def draw(self, request: Request) -> Iterator[DrawingEvent]:
        """Draw a request when its turn comes. Closing the iterator cancels it and frees its place at once.

        Raises:
            Busy: the queue is full.
        """
        guided = request.settings.guidance != 1
        left_s = self.latency.seconds(self.generator.num_drawn(request.settings), guided)
        with self.scheduler.ticket(left_s) as ticket:
            while not ticket.wait(0):
                yield Queued(ticket.line, ticket.forecast()[0])
                ticket.wait(LINE_INTERVAL_S)
            yield from self._draw_served(request, ticket)

    def _draw_served(self, request: Request, ticket: Ticket) -> Iterator[DrawingEvent]:
        num_images, guided = self.generator.num_drawn(request.settings), request.settings.guidance != 1
        started_s, previewed_s, decoding_s = time.monotonic(), 0.0, 0.0
        rows_before = None
        # The first row takes seconds on a slow machine.
        yield Running("reading the prompt", 0.0, ticket.forecast()[1], self.scheduler.served - 1)
        steps = timed(self.generator.draw([request], self.latency.batch_size()))
        try:
            while True:
                preview_due = time.monotonic() - previewed_s >= PREVIEW_INTERVAL_S
                progress, seconds, previews = self.scheduler.run(partial(self._step, steps, preview_due))
                if previews:
                    previewed_s = time.monotonic()
                codes = progress.codes
                share = progress.done / progress.total
                if codes is None:
                    decoding_s += seconds
                    ticket.left_s = max(0.0, num_images * self.latency.picture_s - decoding_s)
                else:
                    # A batch's first row includes the prefill, so it only tells that a row takes no longer.
                    known_s = self.latency.seconds_per_row(len(codes)) * (2 if guided else 1)
                    if seconds < known_s or (rows_before is not None and codes.shape[1] > rows_before):
                        self.latency.learn_row(len(codes), seconds, guided)
                    rows_before = codes.shape[1]
                    decoding_left_s = num_images * self.latency.picture_s
                    sampling_s = self.latency.seconds(num_images, guided) - decoding_left_s
                    ticket.left_s = (1 - share) * sampling_s + decoding_left_s
                if progress.pictures is not None:
                    self.latency.learn_decoding(num_images, decoding_s)
                    described = self.generator.describe(request.settings, request.start)
                    yield Done(request, progress.pictures, time.monotonic() - started_s, described)
                    return
                yield Running(progress.note, share, ticket.forecast()[1], self.scheduler.served - 1, previews)
        finally:
            self.scheduler.run(cast(Any, steps).close)

    def _step(
        self, steps: Iterator[tuple[Progress, float]], preview: bool
    ) -> tuple[Progress, float, list[Image.Image]]:
        """One turn: its progress, its seconds without the previews, and the previews."""
        progress, seconds = next(steps)
        codes = progress.codes if preview else None
        return progress, seconds, ([] if codes is None else self.generator.preview(codes[:PREVIEWS]))

    def read_upload(self, upload: bytes) -> Tensor:
        """The codes [I] of an uploaded picture; UserError if it is no picture, Busy if too many are waiting.

        Uploads are read one at a time, in turns with the drawings, so that a flood of them does not hold up a drawing.
        """
        with self.uploads.ticket(self.upload_s) as ticket:
            ticket.wait()
            started_s = time.monotonic()
            pixels = upload_pixels(upload, self.generator.picture_side)
            codes = self.scheduler.run(lambda: self.generator.read_pixels(pixels))
            self.upload_s = time.monotonic() - started_s
            return codes

    def preview(self, codes: Tensor) -> Image.Image:
        """A picture as far as its first codes [m] go, transparent below."""
        return self.scheduler.run(lambda: self.generator.preview(codes[None]))[0]


def upload_pixels(upload: bytes, side: int) -> NDArray[np.uint8]:
    """The centre square [side, side, 3] of an uploaded file; UserError if it is no picture."""
    if len(upload) > MAX_UPLOAD_BYTES:
        raise UserError(f"the file has {len(upload) / 2**20:.0f} MiB; the limit is {MAX_UPLOAD_BYTES // 2**20}")
    try:
        return square_pixels(open_picture(upload), side)
    except UnusablePicture as unusable:
        if unusable.reason == "too_many_pixels":
            raise UserError(f"the picture is too large: {unusable}") from None
        raise UserError("the file is not a picture that can be read; use a PNG, JPEG, WebP, GIF, BMP or TIFF") from None
