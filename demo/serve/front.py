"""The engine's front: it queues prompts, spreads each over the replicas, and serves HTTP.

There is only one, because there is only one queue. It keeps no lasting state: if it dies, Ray starts another, and
clients send their requests again.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.schema import ReplicaState
from ray.util.metrics import Counter, Gauge, Histogram
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from dalle_lean.errors import UserError
from demo.serve.model_replicas import Drawing, Model, best_of
from demo.serve.wire import (
    BUSY_STATUS,
    FAILED,
    MISTAKE_STATUS,
    MOST_REQUEST_BYTES,
    codes_from_json,
    latency_to_json,
    request_from_json,
)
from demo.service.drawing_service import FIRST_UPLOAD_S, LINE_INTERVAL_S, PREVIEW_INTERVAL_S, UPLOADS_WAITING
from demo.service.scheduler import Busy, Scheduler, Ticket
from inference.request import Request

FRONT = "front"
DRAWERS = "drawers-"  # applications of Ray Serve: the front, and the replicas of a model, with its hash appended
WATCH_S = 0.5
TURN_POLL_S = 0.05

log = logging.getLogger(__name__)


class Front:
    """A Ray Serve deployment.

    Args:
        at_once: prompts drawn at the same time.
        waiting: the most prompts in the queue.
        units_at_once: the most units given to the replicas.
    """

    def __init__(self, at_once: int, waiting: int, units_at_once: int):
        self.line = Scheduler(at_once, waiting)
        self.uploads = Scheduler(at_once=1, waiting=UPLOADS_WAITING)
        self.units_at_once = units_at_once
        # First come, first served, so that prompts drawn at the same time take turns.
        self.slots = asyncio.Semaphore(units_at_once)
        self.models: dict[str, Model] = {}
        self.model: Model | None = None  # the newest, which draws the next prompts
        self.replicas = 0
        self.prompts_total = Counter("dalle_lean_prompts", "Prompts by how they ended.", ("result",))
        self.pictures_total = Counter("dalle_lean_pictures", "Pictures drawn for finished prompts.")
        self.redrawn_total = Counter("dalle_lean_units_redrawn", "Units drawn again after a failure.")
        self.line_gauge = Gauge("dalle_lean_line", "Prompts in the engine by their state.", ("state",))
        self.replicas_gauge = Gauge("dalle_lean_replicas", "Replicas that draw.")
        self.seconds = Histogram(
            "dalle_lean_prompt_seconds", "From arrival to pictures.", [0.5, 1, 2, 5, 10, 20, 60, 300]
        )
        self.watching = asyncio.get_running_loop().create_task(self.watch())

    async def watch(self) -> None:
        """Follow which models and how many replicas there are."""
        while True:
            try:
                await self.find_replicas()
            except Exception:  # Ray Serve's controller may be restarting
                log.exception("cannot see the replicas")
            self.line_gauge.set(self.line.served, {"state": "drawing"})
            self.line_gauge.set(len(self.line) - self.line.served, {"state": "waiting"})
            self.replicas_gauge.set(self.replicas)
            await asyncio.sleep(WATCH_S)

    async def find_replicas(self) -> None:
        """Switch to the newest model that runs; forget those that are gone."""
        apps = (await asyncio.to_thread(serve.status)).applications
        running = {
            name: sum(one.replica_states.get(ReplicaState.RUNNING, 0) for one in app.deployments.values())
            for name, app in apps.items()
            if name.startswith(DRAWERS)
        }
        ready = [name for name in running if apps[name].status == "RUNNING"]
        newest = max(ready, key=lambda name: apps[name].last_deployed_time_s, default=None)
        if newest is not None:
            if newest not in self.models:
                handle = serve.get_app_handle(newest)
                self.models[newest] = Model(newest, handle, await handle.describe.remote())
            self.model = self.models[newest]
        for name in self.models.keys() - running.keys():
            del self.models[name]
        if self.model is not None:
            self.replicas = running.get(self.model.name, 0)
            self.model.latency.replicas = max(1, self.replicas)

    async def in_use(self) -> tuple[str | None, dict[str, int]]:
        """The newest model, and the number of prompts that each model is drawing."""
        newest = None if self.model is None else self.model.name
        return newest, {name: model.prompts for name, model in self.models.items()}

    async def __call__(self, message: HttpRequest) -> Response:
        """Answer an HTTP request; docs/serving.md describes the interface."""
        route = f"{message.method} {message.url.path}"
        if route == "GET /ready":  # 200 once it can draw
            return JSONResponse({"replicas": self.replicas}, 200 if self.model and self.replicas else 503)
        routes = {
            "GET /model": self.describe,
            "POST /read": self.read,
            "POST /preview": self.preview,
            "POST /draw": self.draw,
        }
        if route not in routes:
            return JSONResponse({"error": "not found"}, 404)
        if self.model is None:
            return JSONResponse({"error": "starting"}, BUSY_STATUS, {"Retry-After": "1"})
        try:
            return await routes[route](message, self.model)
        except (Busy, UserError) as refusal:
            return refused(refusal)

    async def describe(self, message: HttpRequest, model: Model) -> Response:
        """What a client needs to know about the model."""
        return JSONResponse({**model.description, "latency": latency_to_json(model.latency)})

    async def read(self, message: HttpRequest, model: Model) -> Response:
        """The codes of a picture's pixels, RGB, rows from the top."""
        pixels = await body(message, model.picture_bytes)
        if len(pixels) != model.picture_bytes:
            raise UserError(f"{len(pixels)} bytes: a picture of this model has {model.picture_bytes}")
        with self.uploads.ticket(FIRST_UPLOAD_S):
            return JSONResponse({"codes": await model.handle.read.remote(pixels)})

    async def preview(self, message: HttpRequest, model: Model) -> Response:
        """A picture as far as its first codes go."""
        content = await read_object(message)
        codes = codes_from_json(content.get("codes"), model.config)
        if len(codes) < model.config.image_side:
            raise UserError(f"{len(codes)} codes: a preview needs at least a row of {model.config.image_side}")
        with self.uploads.ticket(FIRST_UPLOAD_S):
            return JSONResponse({"png": await model.handle.preview.remote(codes)})

    async def draw(self, message: HttpRequest, model: Model) -> Response:
        """Stream a line of JSON for each event, the last with the pictures. Closing the connection cancels."""
        try:
            request = request_from_json(await read_object(message), model.config)
            events = self.answer(request)
            first = await anext(events)
        except (Busy, UserError) as refusal:
            self.prompts_total.inc(tags={"result": "busy" if isinstance(refusal, Busy) else "refused"})
            raise

        async def lines() -> AsyncIterator[str]:
            yield json.dumps(first) + "\n"
            async for event in events:
                yield json.dumps(event) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def answer(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The events of one prompt, which is counted by its outcome; Busy if the queue is full."""
        result, arrived_s = "cancelled", time.monotonic()
        assert self.model is not None
        with self.line.ticket(self.model.seconds(request)) as ticket:
            try:
                while not ticket.wait(0):
                    yield {"state": "waiting", "line": ticket.line, "seconds": ticket.forecast()[0]}
                    said_s = time.monotonic()
                    while not ticket.wait(0) and time.monotonic() - said_s < LINE_INTERVAL_S:
                        await asyncio.sleep(TURN_POLL_S)
                model = self.model
                request.check(model.config)  # the model may have changed in the meantime
                model.prompts += 1
                try:
                    async for event in self.draw_served(request, model, ticket):
                        yield event
                finally:
                    model.prompts -= 1
                result = "drawn"
                self.pictures_total.inc(model.num_drawn(request))
                self.seconds.observe(time.monotonic() - arrived_s)
            except UserError as mistake:
                result = "refused"
                yield {"state": FAILED, "mistake": str(mistake)}
            except Exception as error:  # the front must survive any failure
                log.exception("drawing failed")
                result = FAILED
                yield {"state": FAILED, "error": type(error).__name__}
            finally:
                self.prompts_total.inc(tags={"result": result})

    async def draw_served(self, request: Request, model: Model, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        """Spread a prompt over the replicas and merge what they draw."""
        started_s, units = time.monotonic(), model.units(request)
        drawing, waiting = Drawing([0.0] * len(units), "drawing", [], []), list(range(len(units)))

        async def work() -> None:
            while waiting:
                number = waiting.pop(0)
                async with self.slots:
                    await model.draw_unit(units[number], number, drawing, self.redrawn_total.inc)

        workers = [asyncio.create_task(work()) for _ in range(min(len(units), self.units_at_once))]
        try:
            pending: set[Any] = set(workers)
            while pending:
                share = sum(drawing.shares) / len(units)
                ticket.left_s = (1 - share) * model.seconds(request)
                previews, drawing.previews = drawing.previews, []
                yield {
                    "state": "drawing",
                    "note": drawing.note,
                    "share": share,
                    "seconds": ticket.forecast()[1],
                    "others": self.line.served - 1,
                    "previews": previews,
                }
                done, pending = await asyncio.wait(
                    pending, timeout=PREVIEW_INTERVAL_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for worker in done:
                    worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        yield {
            "state": "drawn",
            "pictures": best_of(drawing.pictures, request),
            "seconds": time.monotonic() - started_s,
            "described": model.described,
        }


async def body(message: HttpRequest, most_bytes: int = MOST_REQUEST_BYTES) -> bytes:
    """A message's body; UserError if it is longer than `most_bytes`."""
    content = b""
    async for part in message.stream():
        content += part
        if len(content) > most_bytes:
            raise UserError(f"the message has more than {most_bytes} bytes")
    return content


async def read_object(message: HttpRequest) -> dict[str, Any]:
    """The JSON object in a message; UserError for anything else."""
    content = await body(message)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError("the message is not a JSON object")
    return found


def refused(reason: Busy | UserError) -> Response:
    """The reason for a refusal, and when to try again."""
    if isinstance(reason, UserError):
        return JSONResponse({"error": str(reason)}, MISTAKE_STATUS)
    facts = {"served": reason.served, "waiting": reason.waiting, "seconds": reason.seconds}
    headers = {"Retry-After": str(max(1, math.ceil(reason.seconds)))}
    return JSONResponse({"error": "busy", **facts}, BUSY_STATUS, headers)
