"""The page's endpoint /draw for programs: settings in, PNG files and their facts out."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr

from dalle_lean.errors import UserError
from demo import progress_views as views
from demo.actions import write_pictures
from demo.form import default_settings, read_request
from demo.service.drawing_service import Done, DrawingService, Queued, Running
from demo.service.scheduler import Busy
from inference.gallery import picture_facts

log = logging.getLogger(__name__)


def add_endpoint(service: DrawingService, parts: SimpleNamespace) -> None:
    """Add /draw to the page being built; docs/page.md documents it."""

    def draw(
        prompt: str,
        # Gradio takes defaults of None from here, all others from the components below.
        num_images: int | None = None,
        best: int | None = None,
        top_k: int = 256,
        top_p: float = 0.75,
        temperature: float = 1.0,
        guidance: float = 1.0,
        seed: int = 0,
        picture: bytes | None = None,
        rows: int = 1,
    ) -> Iterator[tuple[list[tuple[Path, str]], dict[str, Any]]]:
        """Draw a prompt: the best pictures as PNG files, best first, and a dict of their facts."""
        try:
            if num_images is None:
                num_images = service.affordable()
            chosen = {"num_images": num_images, "best": best, "top_k": top_k, "top_p": top_p}
            chosen |= {"temperature": temperature, "guidance": guidance, "seed": seed}
            request = read_request(service, prompt or "", picture, rows, **chosen)  # Gradio passes a prompt of null on
            for event in service.draw(request):
                if isinstance(event, Done):
                    with tempfile.TemporaryDirectory() as folder:
                        paths = write_pictures(event, Path(folder))
                        yield list(zip(paths, views.captions(event), strict=True)), drawn_facts(service, event)
                else:
                    yield [], progress_facts(event)
        except Busy as busy:
            raise gr.Error(f"busy: try again in {busy.seconds:.0f} s", print_exception=False) from None
        except UserError as mistake:
            raise gr.Error(str(mistake), print_exception=False) from None
        except Exception as error:  # with show_error=False Gradio would hide its message
            log.exception("drawing failed")
            raise gr.Error(views.broken(error), print_exception=False) from None

    facts = gr.JSON(visible=False)
    trigger = gr.Button(visible=False)
    # Not the page's controls: for a value out of range, Gradio raises an error that does not name it.
    defaults = {**default_settings(service), "num_images": None, "best": None, "seed": 0}
    rows = gr.Number(defaults.pop("rows"), visible=False)
    numbers = [gr.Number(value, label=name, visible=False) for name, value in defaults.items()]
    trigger.click(
        draw,
        [parts.prompt, *numbers, gr.File(type="binary", visible=False), rows],
        [parts.gallery, facts],
        api_name="draw",
        concurrency_limit=None,
        show_progress="hidden",
    )


def progress_facts(event: Queued | Running) -> dict[str, Any]:
    """Place in the queue or share drawn, and the seconds left."""
    if isinstance(event, Queued):
        return {"state": "waiting", "line": event.line, "seconds": event.seconds}
    return {"state": "drawing", "share": event.share, "seconds": event.seconds}


def drawn_facts(service: DrawingService, event: Done) -> dict[str, Any]:
    """The facts in results.json of `dalle-lean generate`, without file names."""
    return {
        "state": "drawn",
        "prompt": event.request.prompt,
        "settings": event.described,
        "unknown_words": service.generator.unknown_words(event.request.prompt),
        "seconds": event.seconds,
        "pictures": [picture_facts(picture) for picture in event.pictures],
    }
