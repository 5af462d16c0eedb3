"""What happens when something on the page is pressed: updates of its parts, by part."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from dalle_lean.errors import UserError
from demo import progress_views as views
from demo.answer import answer
from demo.controls import Controls
from demo.download import write_pictures
from demo.form import FormValues, first_rows, new_seed, read_request
from demo.service.drawing_service import Done, DrawingService
from demo.service.scheduler import Busy
from inference.request import Request

Update = dict[Any, Any]


@dataclass(frozen=True)
class Parts:
    """The page's components."""

    prompt: Any
    draw: Any
    stop: Any
    status: Any
    unknown: Any
    stage: Any
    gallery: Any
    actions: Any
    download: Any
    more: Any
    keep: Any
    controls: Controls
    drawn: Any
    """This visitor's last Drawn."""
    chosen: Any
    """The place among its pictures that the buttons mean."""


class Actions:
    """The page's behaviour, for one service and one set of components."""

    def __init__(self, service: DrawingService, parts: Parts, examples: Sequence[str] = ()):
        self.service, self.parts, self.examples = service, parts, examples
        self.stops: dict[str, Event] = {}
        """By visitor, while something is being drawn for one."""

    def draw(self, visitor: str, prompt: str, fresh: bool, *controls: Any) -> Iterator[Update]:
        """`controls`: the fields of FormValues; `fresh` takes a new seed."""
        values = FormValues(*controls)
        if fresh:
            values = replace(values, seed=new_seed())
        yield from self.show(visitor, partial(read_request, self.service, prompt, values), values.seed)

    def draw_more(self, visitor: str, prompt: str, drawn: Done | None, chosen: int, *controls: Any) -> Iterator[Update]:
        """New pictures with the upper rows of the chosen one."""
        values = replace(FormValues(*controls), upload=None, seed=new_seed())

        def read() -> Request:
            if drawn is None:
                raise UserError("these pictures are gone; draw new ones")
            request = read_request(self.service, prompt, values)
            return replace(request, start=first_rows(self.service, drawn.pictures[chosen].codes, values.rows))

        yield from self.show(visitor, read, values.seed)

    def open(self, visitor: str, asked: dict[str, str], fresh: bool, *controls: Any) -> Iterator[Update]:
        """A page opened as /?prompt=a+red+heart&seed=3 draws it at once."""
        if "prompt" not in asked:
            yield {self.parts.chosen: 0}
            return
        values = FormValues(*controls)
        if asked.get("seed", "").isdecimal():
            fresh, values = False, replace(values, seed=int(asked["seed"]))
        for update in self.draw(visitor, asked["prompt"], fresh, *vars(values).values()):
            yield {self.parts.prompt: asked["prompt"], **update}

    def show(self, visitor: str, read: Callable[[], Request], seed: int) -> Iterator[Update]:
        """Every state of the page until the pictures are there. It replaces what is being drawn for this visitor."""
        import gradio as gr

        parts = self.parts
        update: Update = {
            parts.stop: gr.Button(interactive=True),
            parts.gallery: gr.Gallery(visible=False),
            parts.actions: gr.Row(visible=False),
            parts.controls.seed: seed,
        }
        if visitor in self.stops:
            self.stops[visitor].set()
        stop = self.stops[visitor] = Event()
        try:
            for view in answer(self.service, read, stop, self.examples):
                if self.stops.get(visitor) is not stop:
                    return
                update[parts.status] = view.status
                if view.unknown is not None:
                    update[parts.unknown] = view.unknown
                if view.stage is not None:
                    update[parts.stage] = view.stage
                if view.drawn is None:
                    yield update
                else:
                    # Gradio keeps its own copies, so these files are needed for a moment only.
                    with tempfile.TemporaryDirectory() as folder:
                        yield {**update, **self.pictures(view.drawn, Path(folder))}
                update = {}
            yield {parts.stop: gr.Button(interactive=False)}
        finally:
            if self.stops.get(visitor) is stop:
                del self.stops[visitor]

    def pictures(self, drawn: Done, folder: Path) -> Update:
        """The gallery and the buttons below it."""
        import gradio as gr

        parts = self.parts
        paths = write_pictures(self.service.generator, drawn, folder)
        captions = [views.caption(picture, drawn.request.settings.seed) for picture in drawn.pictures]
        return {
            # Emptied, not hidden: what is sent to a part that is just appearing may be lost.
            parts.stage: "",
            parts.gallery: gr.Gallery(list(zip(paths, captions, strict=True)), visible=True, selected_index=None),
            parts.actions: gr.Row(visible=True),
            parts.drawn: drawn,
            **self.mean(drawn, 0, paths),
        }

    def mean(self, drawn: Done, place: int, paths: list[Path]) -> Update:
        """The buttons speak of the picture at this place."""
        import gradio as gr

        number = drawn.pictures[place].index
        return {
            self.parts.chosen: place,
            self.parts.download: gr.DownloadButton(f"Download no. {number}", value=paths[place]),
            self.parts.more: gr.Button(f"More like no. {number}"),
        }

    def stop(self, visitor: str) -> Update:
        """The drawing notices at the end of its row."""
        import gradio as gr

        stop = self.stops.get(visitor)
        if stop is None:
            return {self.parts.chosen: 0}
        stop.set()
        return {self.parts.status: views.line(views.STOPPING), self.parts.stop: gr.Button(interactive=False)}

    def choose(self, place: Any, drawn: Done | None) -> Iterator[Update]:
        """The buttons mean the picture that was clicked."""
        if drawn is None or not isinstance(place, int) or not 0 <= place < len(drawn.pictures):
            yield {self.parts.chosen: 0}
            return
        with tempfile.TemporaryDirectory() as folder:
            yield self.mean(drawn, place, write_pictures(self.service.generator, drawn, Path(folder)))

    def keep_seed(self, drawn: Done | None) -> Update:
        """The next drawings use the seed of these."""
        if drawn is None:
            return {self.parts.chosen: 0}
        seed = drawn.request.settings.seed
        said = f"Seed {seed} is kept: the same prompt and settings draw the same pictures again."
        controls = self.parts.controls
        return {controls.seed: seed, controls.new_seed: False, self.parts.status: views.line(said)}

    def look_at_upload(self, upload: bytes | None, rows: int) -> str:
        """The part of it that is kept, or what is wrong with it."""
        if upload is None:
            return ""
        try:
            image = self.service.preview(first_rows(self.service, self.service.read_upload(upload), rows))
        except Busy as busy:
            return views.busy(busy)
        except UserError as mistake:
            return views.failure(str(mistake))
        return views.given_stage(image, rows, of=self.service.generator.model.config.image_side)

    def estimate(self, num_images: int, best: int, guidance: float) -> str:
        """How long it takes with these settings."""
        ranked = self.service.generator.scorer is not None
        return views.estimate(self.service, num_images if ranked else best, guidance)
