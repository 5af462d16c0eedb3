"""What the page says and shows while a prompt is drawn; knows nothing of Gradio."""

import html
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from PIL import Image

from inference.gallery import enlarged
from inference.generator import Generator, Picture, Progress, Settings

log = logging.getLogger(__name__)

WELCOME = "Say in a few words what to draw, then press Enter."
TILE_SIDE = 384  # pixels
# Redrawing the page more often than this only costs time.
SHORTEST_INTERVAL_S = 0.15


@dataclass(frozen=True)
class View:
    """One state of the page: a line of HTML, and pictures with their captions."""

    status: str
    pictures: list[tuple[Image.Image, str]] = field(default_factory=list)


def answer(generator: Generator, prompt: str, settings: Settings) -> Iterator[View]:
    """Draw a prompt as a series of views; a mistake or a failure is a view too. Close the iterator to cancel."""
    note = ""
    try:
        if excess := generator.excess_tokens(prompt):
            limit = generator.model.config.text_len
            note = f"The prompt is longer than the {limit} tokens this model reads; its last {excess} were left out."
        started_s = shown_s = time.monotonic()
        for progress in generator.draw(prompt, settings):
            now_s = time.monotonic()
            if progress.pictures is not None:
                yield finished(progress.pictures, now_s - started_s, note)
            elif now_s - shown_s > SHORTEST_INTERVAL_S:
                shown_s = now_s
                yield View(progress_line(progress, now_s - started_s))
    except ValueError as mistake:
        yield failure(str(mistake))
    except (RuntimeError, MemoryError) as error:
        log.exception("drawing %r failed", prompt)
        yield failure(f"drawing failed: {str(error).splitlines()[0] if str(error) else 'out of memory'}")


def finished(pictures: list[Picture], seconds: float, note: str = "") -> View:
    """The pictures, and a line that says how long they took."""
    captions = [
        ("" if picture.score is None else f"score {picture.score:.3f} · ") + f"no. {picture.index}"
        for picture in pictures
    ]
    shown = "1 picture" if len(pictures) == 1 else f"{len(pictures)} pictures, best first"
    if pictures[0].score is None and len(pictures) > 1:
        shown = f"{len(pictures)} pictures, not ranked: this model has no CLIP"
    tiles = [(enlarged(picture.image, TILE_SIDE), caption) for picture, caption in zip(pictures, captions, strict=True)]
    return View(line(f"{shown}, in {seconds:.1f} s. {note}".strip()), tiles)


def progress_line(progress: Progress, seconds: float) -> str:
    """A bar with the share that is drawn and the time left."""
    share = progress.done / progress.total
    left_s = seconds / share - seconds if share else 0
    words = f"{progress.note}: {share:.0%}" + (f", about {left_s:.0f} s left" if left_s >= 1 else "")
    bar = f'<div class="bar"><div style="width: {share:.0%}"></div></div>'
    return f'<div class="status">{bar}<span>{html.escape(words.capitalize())}</span></div>'


def failure(message: str) -> View:
    """A mistake as a sentence."""
    sentence = message[:1].upper() + message[1:]
    return View(line(sentence if sentence.endswith((".", "!", "?")) else sentence + ".", kind="status mistake"))


def line(text: str, kind: str = "status") -> str:
    """A sentence as HTML, read out by screen readers when it changes."""
    return f'<div class="{kind}" role="status">{html.escape(text)}</div>'


def facts(generator: Generator) -> str:
    """One line about the model for the page's foot."""
    config = generator.model.config
    parameters = sum(parameter.numel() for parameter in generator.model.parameters())
    side = generator.picture_side
    ranked = "ranked by CLIP" if generator.scorer is not None else "not ranked: no CLIP in this model"
    return (
        f"{parameters:,} parameters · {config.num_layers} layers · pictures of {side} × {side} pixels, "
        f"drawn as {config.image_len} codes out of {config.image_vocab_size:,} · {ranked} · on {generator.device.type}"
    )
