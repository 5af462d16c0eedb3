"""The messages between the engine and its clients: requests and events as JSON.

Clients are not trusted: every field of a request is checked.
"""

import base64
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.model.config import DalleConfig
from demo.form import check_limits
from demo.service.drawing_service import Done, DrawingEvent, Queued, Running
from demo.service.latency_model import LatencyModel
from inference.request import Picture, Request, Settings

MOST_REQUEST_BYTES = 2**20  # of a request's JSON; a prompt and a picture's codes take far less
BUSY_STATUS, MISTAKE_STATUS = 503, 422
FAILED = "failed"  # state in the last line of a drawing that the engine gave up


def request_to_json(request: Request) -> dict[str, Any]:
    start = None if request.start is None else request.start.tolist()
    return {"prompt": request.prompt, "settings": asdict(request.settings), "start": start}


def request_from_json(content: Any, config: DalleConfig) -> Request:
    """The request; UserError if it is malformed or asks for more than a page may."""
    if not isinstance(content, dict) or not isinstance(content.get("prompt"), str):
        raise UserError("a request is an object with a prompt; see docs/serving.md")
    settings, start = content.get("settings", {}), content.get("start")
    if not isinstance(settings, dict) or not settings.keys() <= Settings.__dataclass_fields__.keys():
        raise UserError(f"settings must be an object with some of {', '.join(Settings.__dataclass_fields__)}")
    request = Request(
        content["prompt"], Settings(**settings), None if start is None else codes_from_json(start, config)
    )
    request.check(config)
    check_limits(request.prompt, request.settings, config)
    return request


def codes_from_json(codes: Any, config: DalleConfig) -> Tensor:
    """Codes [m], at most those of a picture; UserError for anything else."""
    fits = isinstance(codes, list) and len(codes) <= config.image_len
    if not fits or not all(type(code) is int and 0 <= code < config.image_vocab_size for code in codes):
        raise UserError(
            f"codes must be a list of at most {config.image_len} whole numbers in 0..{config.image_vocab_size - 1}"
        )
    return torch.tensor(codes, dtype=torch.long)


def png(image: Image.Image) -> str:
    """A picture as a PNG file in base64."""
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def image_of(text: str) -> Image.Image:
    """The picture in a PNG file in base64."""
    image = Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"])
    image.load()
    return image


def picture_to_json(picture: Picture) -> dict[str, Any]:
    return {"index": picture.index, "score": picture.score, "codes": picture.codes.tolist(), "png": png(picture.image)}


def event_from_json(event: Mapping[str, Any], request: Request) -> DrawingEvent:
    """The event in a line of the engine's answer; UserError if the request cannot be drawn, RuntimeError if the engine
    gave up."""
    match event["state"]:
        case "waiting":
            return Queued(event["line"], event["seconds"])
        case "drawing":
            previews = [image_of(preview) for preview in event["previews"]]
            return Running(event["note"], event["share"], event["seconds"], event["others"], previews)
        case "drawn":
            pictures = [
                Picture(image_of(one["png"]), one["score"], one["index"], torch.tensor(one["codes"]))
                for one in event["pictures"]
            ]
            return Done(request, pictures, event["seconds"], event["described"])
    if "mistake" in event:
        raise UserError(event["mistake"])
    raise RuntimeError(f"the engine gave up: {event.get('error')}")


def latency_to_json(latency: LatencyModel) -> dict[str, Any]:
    return {**vars(latency), "row_s": list(latency.row_s.items())}


def latency_from_json(content: Mapping[str, Any]) -> LatencyModel:
    return LatencyModel(**{**content, "row_s": dict(content["row_s"])})
