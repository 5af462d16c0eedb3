"""What the page shows from a prompt to its pictures, whatever happens on the way; knows nothing of Gradio."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

from dalle_lean.errors import UserError
from dalle_lean.vocabulary import content_words
from demo import progress_views as views
from demo.service.drawing_service import Done, DrawingEvent, DrawingService, Queued, Running
from demo.service.scheduler import Busy
from inference.generator import Generator, Request

NUM_KNOWN = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class View:
    """One state of the page."""

    status: str
    """A line of HTML."""
    stage: str | None = None
    """The place of the pictures until there are some, HTML; None leaves it as it is."""
    unknown: str | None = None
    """What the model has not learnt to draw, HTML; None leaves it as it is."""
    drawn: Done | None = None


def answer(
    service: DrawingService, read: Callable[[], Request], stop: Event, examples: Sequence[str] = ()
) -> Iterator[View]:
    """Draw a request as a series of views; a mistake or a failure is a view too.

    Set `stop`, or close the iterator, to cancel: everything is freed at the end of the row being drawn.

    Args:
        examples: prompts, of which some are named where the model knows no word of the request's.
    """
    try:
        request = read()
        num_images = service.num_drawn(request.settings)
        unknown = unknown_words(service.generator, request.prompt, examples)
        yield View(views.line("Reading the prompt."), views.growing_stage([], num_images), unknown)
        with closing(cast(Any, service.draw(request))) as events:
            for event in events:
                if stop.is_set() and not isinstance(event, Done):
                    yield ended(views.line(views.STOPPED))
                    return
                yield view_of(service, event, num_images)
    except Busy as busy:
        yield ended(views.busy(busy))
    except UserError as mistake:
        yield ended(views.failure(str(mistake)))
    except Exception:  # whatever it was, the page goes on and says so
        log.exception("drawing failed")
        yield ended(views.failure(views.BROKEN))


def ended(status: str) -> View:
    """No pictures."""
    return View(status, views.empty_stage(), unknown="")


def unknown_words(generator: Generator, prompt: str, examples: Sequence[str]) -> str:
    """What of the prompt the model has not learnt; where that is all of it, which of the examples it knows."""
    words = generator.unknown_words(prompt) or []
    if words != content_words(prompt):
        return views.unknown(words)
    known = [example for example in examples if not generator.unknown_words(example)]
    return views.unknown(words, known[:NUM_KNOWN])


def view_of(service: DrawingService, event: DrawingEvent, num_images: int) -> View:
    """How an event looks."""
    if isinstance(event, Queued):
        return View(views.waiting(event))
    if isinstance(event, Running):
        return View(views.drawing(event), views.growing_stage(event.previews, num_images) if event.previews else None)
    return View(views.finished(event, remarks(service, event.request)), drawn=event)


def remarks(service: DrawingService, request: Request) -> str:
    """What the drawer should know about the pictures."""
    said = []
    if excess := service.generator.excess_tokens(request.prompt):
        limit = service.generator.model.config.text_len
        said.append(f"The prompt is longer than the {limit} tokens this model reads; its last {excess} were left out.")
    if request.start is not None:
        side = service.generator.model.config.image_side
        said.append(f"The upper {len(request.start) // side} of {side} rows were given.")
    return " ".join(said)
