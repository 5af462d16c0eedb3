"""The engine's client: a generator and a service for a page that leave the drawing to the engine."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.io.files import write_json
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import Dalle
from dalle_lean.progress import OnNotice, silent
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.vocabulary import Vocabulary
from demo.serve.wire import BUSY_STATUS, MISTAKE_STATUS, event_from_json, image_of, latency_from_json, request_to_json
from demo.service.drawing_service import Done, DrawingEvent, DrawingService, Queued
from demo.service.scheduler import Busy
from inference.generator import Generator
from inference.request import Request

CONNECT_S = 5.0
SILENCE_S = 60.0  # the engine sends something every half second; after a longer silence it counts as dead
PATIENCE_S = 120.0  # how long to retry while the engine cannot be reached
RETRY_INTERVAL_S = 0.5
MOST_BREAKS = 10  # times that the engine goes away during one prompt: that may be what kills it
REFRESH_S = 10.0  # age from which the engine's speed and model are asked for again before drawing


class EngineAway(Exception):
    """The engine does not answer, or its answer breaks off."""


class Engine:
    """The engine's HTTP interface; `on_notice` is told when a call begins to wait for it."""

    def __init__(self, address: str, on_notice: OnNotice = silent):
        if not address.startswith(("http://", "https://")):
            raise UserError(f"--serve {address}: give the engine's address, such as http://127.0.0.1:8000")
        self.address, self.on_notice = address.rstrip("/"), on_notice
        try:
            self.http = httpx.Client(
                base_url=self.address,
                timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise UserError(f"--serve {address}: {error}") from None

    def ask(self, method: str, path: str, **content: Any) -> Any:
        """A short answer in JSON. Retries while the engine is away; UserError after PATIENCE_S, Busy if it is full."""
        end_s = time.monotonic() + PATIENCE_S
        is_waiting = False
        while True:
            try:
                with self.request(method, path, **content) as answer:
                    text = answer.read()
                try:
                    return json.loads(text)
                except ValueError:
                    raise UserError(f"{self.address} is no engine: it answers {path} with no JSON") from None
            except EngineAway as away:
                if time.monotonic() > end_s:
                    raise UserError(f"no engine answers at {self.address}: {away}") from None
                if not is_waiting:
                    self.on_notice(f"no engine answers at {self.address} yet ({away}); trying for {PATIENCE_S:.0f} s")
                is_waiting = True
                time.sleep(RETRY_INTERVAL_S)

    @contextmanager
    def request(self, method: str, path: str, **content: Any) -> Iterator[httpx.Response]:
        """A streamed answer; Busy, UserError for a mistake, EngineAway if a retry may help."""
        try:
            with self.http.stream(method, path, **content) as answer:
                if answer.status_code == httpx.codes.OK:
                    yield answer
                    return
                answer.read()
                try:
                    said = answer.json()
                except ValueError:
                    said = {}
                if answer.status_code == MISTAKE_STATUS and "error" in said:
                    raise UserError(said["error"])
                if answer.status_code == BUSY_STATUS and said.get("error") == "busy":
                    raise Busy(said["served"], said["waiting"], said["seconds"])
                raise EngineAway(f"HTTP status {answer.status_code}")
        except httpx.TransportError as error:
            raise EngineAway(str(error) or type(error).__name__) from None


class RemoteGenerator(Generator):
    """A generator without weights: it reads prompts and describes drawings itself, and the engine does the rest."""

    def __init__(self, engine: Engine, description: dict[str, Any]):
        self.engine, content, files = engine, description["content"], description["files"]
        config = DalleConfig.from_dict(content["dalle"])
        self.model = Dalle(config, device="meta")
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            (place / "tokenizer.json").write_text(files["tokenizer.json"], encoding="utf-8")
            self.tokenizer = Tokenizer.from_file(place / "tokenizer.json")
            self.vocabulary = None
            if "vocabulary.json" in files:
                write_json(place / "vocabulary.json", json.loads(files["vocabulary.json"]))
                self.vocabulary = Vocabulary.load(place / "vocabulary.json")
        scorer = description["scorer"]
        self.scorer = None if scorer is None else cast(Any, SimpleNamespace(name=scorer))
        self.decoder = cast(Any, SimpleNamespace(precision=description["precision"]))
        self.device = torch.device(description["device"])
        self.model_sha256 = content["parts"]["model.safetensors"]
        self.caption_dropout = content.get("caption_dropout")
        self.guidance = float(content.get("guidance", 1.0))
        self.vqgan = cast(Any, SimpleNamespace(config=SimpleNamespace(downscale=description["downscale"])))

    def read_pixels(self, pixels: NDArray[np.uint8]) -> Tensor:
        return torch.tensor(self.engine.ask("POST", "/read", content=pixels.tobytes())["codes"])

    def preview(self, codes: Tensor) -> list[Image.Image]:
        return [image_of(self.engine.ask("POST", "/preview", json={"codes": one.tolist()})["png"]) for one in codes]


class RemoteService(DrawingService):
    """Draws through an engine, which has one queue for all its pages.

    Raises:
        UserError: no engine answers at the address.
    """

    def __init__(self, address: str, on_notice: OnNotice = silent):
        self.engine = Engine(address, on_notice)
        description = self.engine.ask("GET", "/model")
        super().__init__(RemoteGenerator(self.engine, description), latency_from_json(description.pop("latency")))
        self.description = description
        self.refreshed_s = time.monotonic()

    @property
    def card(self) -> str:
        """The model's README.md."""
        return str(self.description["files"].get("README.md", ""))

    def refresh(self) -> None:
        """Update the engine's speed and model."""
        self.refreshed_s = time.monotonic()
        description = self.engine.ask("GET", "/model")
        self.latency = latency_from_json(description.pop("latency"))
        if description != self.description:
            self.generator, self.description = RemoteGenerator(self.engine, description), description

    def draw(self, request: Request) -> Iterator[DrawingEvent]:
        """As DrawingService does. If the engine breaks off, asks again: the pictures are the same whenever drawn.

        UserError if it stays away for PATIENCE_S, or goes away MOST_BREAKS times.
        """
        if time.monotonic() - self.refreshed_s > REFRESH_S:
            self.refresh()
        seconds = self.seconds(self.generator.num_drawn(request.settings), request.settings.guidance)
        event: DrawingEvent = Queued(1, seconds)
        away_since_s: float | None = None
        breaks = 0
        while True:
            try:
                for event in self.answer(request):
                    away_since_s = None
                    yield event
                    if isinstance(event, Done):
                        return
            except EngineAway as away:
                if away_since_s is None:
                    away_since_s, breaks = time.monotonic(), breaks + 1
                if breaks == MOST_BREAKS or time.monotonic() - away_since_s > PATIENCE_S:
                    raise UserError(f"the engine is away: {away}; try again later") from None
            # Again, so that the page can react to Stop in the meantime.
            yield event
            time.sleep(RETRY_INTERVAL_S)

    def answer(self, request: Request) -> Iterator[DrawingEvent]:
        """The engine's events; EngineAway once they break off."""
        with self.engine.request("POST", "/draw", json=request_to_json(request)) as answer:
            for line in answer.iter_lines():
                event = event_from_json(json.loads(line), request)
                if isinstance(event, Done):
                    known = self.generator.describe(request.settings, request.start)
                    event = replace(event, described=known | event.described)
                yield event
        raise EngineAway("its answer broke off")
