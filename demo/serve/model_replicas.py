"""The replicas of one model: a prompt in units, and a unit drawn on some replica, again where that one dies."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig
from demo.serve.drawer import UNIT, Step
from demo.serve.wire import latency_from_json
from inference.request import Request

TRIES = 10
"""Of a unit; each death of a replica takes its units with it."""
RETRY_PAUSE_S = 0.2

log = logging.getLogger(__name__)


@dataclass
class Drawing:
    """What is known of a prompt that is being drawn."""

    shares: list[float]
    """Of each unit, 0..1."""
    note: str
    previews: list[str]
    """New ones."""
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
        """What fixes the pictures besides the prompt, where it differs from what a client knows."""
        self.described["model_sha256"] = content["parts"]["model.safetensors"]
        self.prompts = 0
        """That are being drawn by it."""

    def num_drawn(self, request: Request) -> int:
        """How many pictures of a request are drawn."""
        return request.settings.num_drawn(ranked=self.description["scorer"] is not None)

    def seconds(self, request: Request) -> float:
        """Of a request when no other is drawn."""
        return self.latency.seconds(self.num_drawn(request), request.settings.guidance != 1)

    def units(self, request: Request) -> list[Request]:
        """A request in parts of at most UNIT pictures; each part keeps as many as the whole, so none is missed."""
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
        """Draw one unit on some replica, and on another where that one dies."""
        for attempt in range(TRIES):
            try:
                last = await self.follow(unit, number, drawing)
            except Exception:  # a replica that dies shows in many ways; what is redrawn is counted
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
            num_images, row_s, painting_s = last.learned
            self.latency.learn_row(num_images, row_s, unit.settings.guidance != 1)
            self.latency.learn_painting(unit.settings.num_images, painting_s)
            return

    async def follow(self, unit: Request, number: int, drawing: Drawing) -> Step:
        """Show the steps of a unit as they come; returns the last one."""
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
    """The best of all units' pictures, in the order of one machine."""
    ranked = sorted(pictures, key=lambda one: (-(one["score"] or 0.0), one["index"]))
    return ranked[: request.settings.num_best]
