"""The replicas of one model: prompts are cut into units, and units drawn on any replica, again if it dies."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig
from demo.serve.drawer import UNIT, Step
from demo.serve.wire import latency_from_json
from inference.ranking import equal_ones_last
from inference.request import Request

TRIES = 10  # for each unit; a replica that dies takes its units with it
RETRY_PAUSE_S = 0.2

log = logging.getLogger(__name__)


@dataclass
class Drawing:
    shares: list[float]  # share drawn of each unit, 0..1
    note: str
    previews: list[str]  # not sent yet, as PNGs in base64
    pictures: list[dict[str, Any]]


class Model:
    """The replicas of one model."""

    def __init__(self, name: str, handle: Any, description: dict[str, Any]):
        self.name, self.handle, self.description = name, handle, description
        content = description["content"]
        self.config = DalleConfig.from_dict(content["dalle"])
        self.picture_bytes = 3 * (self.config.image_side * description["downscale"]) ** 2
        self.latency = latency_from_json(description["latency"])
        self.described = {name: description[name] for name in ("precision", "scorer")}
        """What determines the pictures and may have changed since the client asked."""
        self.described["model_sha256"] = content["parts"]["model.safetensors"]
        self.prompts = 0  # being drawn with this model

    def num_drawn(self, request: Request) -> int:
        return request.settings.num_drawn(ranked=self.description["scorer"] is not None)

    def seconds(self, request: Request) -> float:
        """Seconds for a request if nobody else draws."""
        return self.latency.seconds(self.num_drawn(request), request.settings.guidance != 1)

    def units(self, request: Request) -> list[Request]:
        """A request in units of at most UNIT pictures. Each keeps as many as the whole, so that no good one is lost."""
        settings, total = request.settings, self.num_drawn(request)
        sizes = [min(UNIT, total - first) for first in range(0, total, UNIT)]
        return [
            replace(
                request,
                settings=replace(settings, num_images=size, best=min(size, settings.num_best)),
                first=number * UNIT,
            )
            for number, size in enumerate(sizes)
        ]

    async def draw_unit(self, unit: Request, number: int, drawing: Drawing, on_redrawn: Callable[[], None]) -> None:
        """Draw one unit on any replica, and on another if that one dies."""
        for attempt in range(TRIES):
            try:
                last = await self.follow(unit, number, drawing)
            except Exception:  # a dead replica shows in many ways
                if attempt == TRIES - 1:
                    raise
                log.warning("drawing a unit again", exc_info=True)
                on_redrawn()
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
                continue
            if last.mistake is not None:
                raise UserError(last.mistake)
            assert last.pictures is not None
            assert last.learned is not None
            drawing.shares[number] = 1.0
            drawing.pictures += last.pictures
            num_images, row_s, decoding_s = last.learned
            self.latency.learn_row(num_images, row_s, unit.settings.guidance != 1)
            self.latency.learn_decoding(unit.settings.num_images, decoding_s)
            return

    async def follow(self, unit: Request, number: int, drawing: Drawing) -> Step:
        """Record the steps of a unit as they come; returns the last one."""
        steps = self.handle.options(stream=True).draw.remote(unit, number == 0)
        try:
            async for step in steps:
                if step.mistake is not None or step.pictures is not None:
                    return step
                drawing.shares[number], drawing.note = step.share, step.note
                drawing.previews = list(step.previews) or drawing.previews
        except BaseException:
            steps.cancel()
            raise
        raise RuntimeError("a replica ended a unit without its pictures")


def best_of(pictures: Sequence[dict[str, Any]], request: Request) -> list[dict[str, Any]]:
    """The best pictures of all units, in the order that one machine gives."""
    ranked = sorted(pictures, key=lambda one: (-(one["score"] or 0.0), one["index"]))
    if any(one["score"] is not None for one in pictures):
        ranked = equal_ones_last(ranked, lambda one: tuple(one["codes"]))
    return ranked[: request.settings.num_best]
