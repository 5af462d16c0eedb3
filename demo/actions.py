"""What the page does when a visitor acts: each action returns updates, by component."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any, cast

import gradio as gr

from dalle_lean.errors import UserError
from dalle_lean.vocabulary import content_words
from dalle_lean.words import shortened
from demo import progress_views as views
from demo.form import LARGEST_EXACT_SEED, cut_prompt, first_rows, new_seed, prompt_fields, read_request
from demo.service.drawing_service import Done, DrawingEvent, DrawingService, Queued
from demo.service.scheduler import Busy
from inference.gallery import picture_metadata, png_bytes, prompt_metadata
from inference.ranking import all_alike, all_blank
from inference.request import Request, tidy

EXAMPLES_NAMED = 3
TABS_KEPT = 500
KEPT_S = 3600
GONE = "these pictures are gone; draw new ones"

Update = dict[Any, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """What a tab shows: its last pictures, the index of the one that the buttons act on, and since when."""

    drawn: Done
    index: int
    since_s: float


class ShownByTab:
    """What each of the last TABS_KEPT tabs shows, for KEPT_S at least; for any number of threads.

    Not a gr.State: with one, each tab holds a connection, of which a browser opens six to a host.
    """

    def __init__(self) -> None:
        self.tabs: dict[str, Shown] = {}  # the longest shown first
        self.lock = Lock()

    def put(self, tab: gr.Request, drawn: Done, index: int = 0) -> None:
        """Note what a tab shows from now on."""
        key, now_s = str(tab.session_hash), time.monotonic()
        with self.lock:
            self.tabs.pop(key, None)
            self.tabs[key] = Shown(drawn, index, now_s)
            while len(self.tabs) > TABS_KEPT or next(iter(self.tabs.values())).since_s < now_s - KEPT_S:
                del self.tabs[next(iter(self.tabs))]

    def get(self, tab: gr.Request) -> Shown | None:
        """What a tab shows; None if nothing, or if that was dropped."""
        with self.lock:
            return self.tabs.get(str(tab.session_hash))


class Actions:
    """The page's behaviour, for one service and the components that `page.add_parts` makes.

    examples: prompts to suggest if the model knows no word of the visitor's prompt.
    """

    def __init__(self, service: DrawingService, parts: SimpleNamespace, examples: Sequence[str] = ()):
        self.service, self.parts, self.examples = service, parts, examples
        self.fields = prompt_fields(service.generator.model.config, service.generator.scorer is not None)
        self.stops: dict[str, Event] = {}  # by tab, for each tab with a drawing in progress
        self.shown = ShownByTab()

    def greet(self) -> Update:
        """The default number of candidates and the estimates, as the machine draws now."""
        num_images = self.service.default_drawn()
        update: Update = {
            self.parts.status: views.welcome(self.service),
            self.parts.estimate: views.estimate(self.service, num_images),
        }
        if self.service.generator.scorer is not None:
            update[self.parts.inputs["num_images"]] = gr.Slider(value=num_images, info=views.advice(self.service))
        return update

    def draw(self, tab: gr.Request, prompt: str, fresh: bool, *controls: Any) -> Iterator[Update]:
        """Draw a prompt; `controls` are the values of `parts.inputs`, `fresh` takes a new seed."""
        values = self.values(controls)
        if fresh:
            values["seed"] = new_seed()
        yield from self.show(tab, prompt, lambda prompt: self.read(prompt, values))

    def draw_more(self, tab: gr.Request, prompt: str, *controls: Any) -> Iterator[Update]:
        """Draw new pictures with the upper rows of the chosen one."""
        values = self.values(controls) | {"upload": None, "seed": new_seed()}
        shown = self.shown.get(tab)

        def read(prompt: str) -> Request:
            if shown is None:
                raise UserError(GONE)
            request, codes = self.read(prompt, values), shown.drawn.pictures[shown.index].codes
            return replace(request, start=first_rows(self.service, codes, values["rows"]))

        yield from self.show(tab, prompt, read)

    def values(self, controls: Sequence[Any]) -> dict[str, Any]:
        """The arguments of `read_request`, by name."""
        return dict(zip(self.parts.inputs, controls, strict=True))

    def read(self, prompt: str, values: dict[str, Any]) -> Request:
        """The request; UserError for a mistake, in the words of the page. If fewer than `best` are drawn, all are
        shown."""
        values = {
            name: self.fields[name].read(value) if name in self.fields else value for name, value in values.items()
        }
        if self.service.generator.scorer is not None:
            values["best"] = min(values["best"], values["num_images"])
        return read_request(self.service, prompt, **values)

    def open(self, tab: gr.Request, fresh: bool, *controls: Any) -> Iterator[Update]:
        """Draw the prompt of an address such as /?prompt=a+red+heart&seed=3 at once; keep a seed without a prompt."""
        asked, values = dict(tab.query_params), self.values(controls)
        start: Update = {self.parts.prompt: cut_prompt(asked["prompt"])} if "prompt" in asked else {}
        seed = asked.get("seed")
        if seed is not None:
            if not seed.isdecimal() or len(seed) > len(str(LARGEST_EXACT_SEED)) or int(seed) > LARGEST_EXACT_SEED:
                said = f"the seed in the address must be a whole number from 0 to {LARGEST_EXACT_SEED}"
                yield {**start, self.parts.status: views.failure(said)}
                return
            fresh, values["seed"] = False, int(seed)
        if "prompt" in asked:
            for update in self.draw(tab, asked["prompt"], fresh, *values.values()):
                yield {**start, **update}
        elif seed is not None:
            yield {self.parts.inputs["seed"]: values["seed"], self.parts.new_seed: False}
        else:
            yield gr.skip()

    def show(self, tab: gr.Request, prompt: str, read: Callable[[str], Request]) -> Iterator[Update]:
        """Yield the states of the page until the pictures are done. Cancels the tab's previous drawing.

        prompt: cut if it is too long; `read` makes the request for it.
        """
        key, shorter = str(tab.session_hash), cut_prompt(prompt)
        before = self.stops.get(key)
        if before is not None:
            before.set()
        stop = self.stops[key] = Event()
        try:
            cut = views.cut(prompt, shorter)
            for update in self.answer(tab, partial(read, shorter), stop, cut, before is not None):
                if self.stops.get(key) is not stop:
                    return
                yield update
        finally:
            if self.stops.get(key) is stop:
                del self.stops[key]

    def answer(
        self, tab: gr.Request, read: Callable[[], Request], stop: Event, cut: str = "", unfinished: bool = False
    ) -> Iterator[Update]:
        """Draw a request for a tab; mistakes and failures become updates, which leave finished pictures on the page
        until this drawing begins.

        Setting `stop` or closing the iterator cancels the drawing at the end of the current row.

        cut: says that the prompt was cut. unfinished: whether the page shows pictures that will not be finished.
        """
        parts = self.parts
        try:
            request = read()
            begin = self.begin(request, cut)
            with closing(cast(Any, self.service.draw(request))) as events:
                for event in events:
                    if stop.is_set():
                        break
                    if isinstance(event, Done):
                        self.shown.put(tab, event)
                        # Gradio copies the files at once.
                        with tempfile.TemporaryDirectory() as folder:
                            yield {**begin, **self.pictures(event, Path(folder))}
                        return
                    yield {**begin, **self.progress(request, event)}
                    begin, unfinished = {}, True
            said = views.line(views.STOPPED)
        except Busy as busy:
            said = views.busy(busy)
        except UserError as mistake:
            said = views.failure(str(mistake))
        except Exception as error:  # the page must survive any failure, and report it
            log.exception("drawing failed")
            said = views.failure(views.broken(error))
        yield self.ended(said) if unfinished else {parts.status: said}

    def begin(self, request: Request, cut: str) -> Update:
        """The page without earlier pictures, ready for those of a request."""
        parts = self.parts
        update: Update = {
            parts.stop: gr.Button(interactive=True),
            parts.gallery: gr.Gallery(visible=False),
            parts.actions: gr.Row(visible=False),
            parts.stage: views.growing_stage([], self.service.generator.num_drawn(request.settings)),
            parts.unknown: cut + self.read_as(request.prompt) + self.unknown_words(request.prompt),
            parts.inputs["seed"]: request.settings.seed,
        }
        return {**update, parts.prompt: request.prompt} if cut else update

    def ended(self, status: str) -> Update:
        """The page after a drawing without pictures."""
        parts = self.parts
        return {
            parts.status: status,
            parts.stop: gr.Button(interactive=False),
            parts.stage: views.empty_stage(),
            parts.unknown: "",
        }

    def read_as(self, prompt: str) -> str:
        """Says how emoji were read; empty without any."""
        plain = self.service.generator.plain(prompt)
        return "" if plain == tidy(prompt) else views.read_as(plain)

    def unknown_words(self, prompt: str) -> str:
        """Names the words that the model has not learnt, and if it knows none, examples that it knows."""
        generator = self.service.generator
        words = generator.unknown_words(prompt) or []
        suggestions = generator.suggestions(prompt)
        if words != content_words(generator.plain(prompt)):
            return views.unknown(words, suggestions=suggestions)
        known = [example for example in self.examples if not generator.unknown_words(example)]
        return views.unknown(words, known[:EXAMPLES_NAMED], suggestions)

    def progress(self, request: Request, event: DrawingEvent) -> Update:
        """The page while a request waits or is being drawn."""
        if isinstance(event, Queued):
            return {self.parts.status: views.waiting(event)}
        assert not isinstance(event, Done)
        update = {self.parts.status: views.drawing(event)}
        if event.previews:
            num_images = self.service.generator.num_drawn(request.settings)
            update[self.parts.stage] = views.growing_stage(event.previews, num_images)
        return update

    def pictures(self, drawn: Done, folder: Path) -> Update:
        """The gallery and the buttons below it."""
        parts = self.parts
        paths = write_pictures(drawn, folder)
        return {
            parts.status: views.finished(drawn, self.remarks(drawn)),
            parts.stop: gr.Button(interactive=False),
            # Emptied, not hidden: an update of a component that is just appearing may be lost.
            parts.stage: "",
            parts.gallery: gr.Gallery(
                list(zip(paths, views.captions(drawn), strict=True)), visible=True, selected_index=None
            ),
            parts.actions: gr.Row(visible=True),
            **self.act_on(drawn, 0, paths),
        }

    def remarks(self, drawn: Done) -> str:
        """Sentences about a truncated prompt, given rows, and pictures that are all the same."""
        generator, request, said = self.service.generator, drawn.request, []
        if unread := generator.unread(request.prompt):
            said.append(f"The prompt is too long: I did not read “{shortened(unread)}”.")
        if request.start is not None:
            side = generator.model.config.image_side
            said.append(f"The upper {len(request.start) // side} of {side} rows were kept.")
        if all_blank(drawn.pictures):
            said.append("All are of one colour: the model draws nothing for these words. Try fewer or others.")
        elif all_alike(drawn.pictures):
            said.append("All came out alike: other words, such as a size or a place, make others.")
        return " ".join(said)

    def act_on(self, drawn: Done, index: int, paths: list[Path]) -> Update:
        """Make the buttons act on the picture at this index."""
        number = drawn.pictures[index].index
        return {
            self.parts.download: gr.DownloadButton(f"Download no. {number}", value=paths[index]),
            self.parts.more: gr.Button(f"More like no. {number}"),
        }

    def choose(self, event: gr.SelectData, tab: gr.Request) -> Iterator[Update]:
        """Make the buttons act on the picture that was clicked."""
        shown, index = self.shown.get(tab), event.index
        if shown is None or not isinstance(index, int) or not 0 <= index < len(shown.drawn.pictures):
            yield gr.skip()
            return
        drawn = shown.drawn
        self.shown.put(tab, drawn, index)
        with tempfile.TemporaryDirectory() as folder:
            yield self.act_on(drawn, index, write_pictures(drawn, Path(folder)))

    def stop(self, tab: gr.Request) -> None:
        """Stop the tab's drawing at the end of its row."""
        stop = self.stops.get(str(tab.session_hash))
        if stop is not None:
            stop.set()

    def keep_seed(self, tab: gr.Request) -> Update:
        """Use the seed of these pictures from now on."""
        shown = self.shown.get(tab)
        if shown is None:
            return {self.parts.status: views.failure(GONE)}
        drawn = shown.drawn
        seed = drawn.request.settings.seed
        said = f"Seed {seed} is kept: the same prompt and settings draw the same pictures again."
        if drawn.request.start is not None:
            said = f"Seed {seed} is kept, but not the upper rows of these pictures: without them, others are drawn."
        return {self.parts.inputs["seed"]: seed, self.parts.new_seed: False, self.parts.status: views.line(said)}

    def preview_upload(self, upload: bytes | None, rows: int) -> str:
        """Show an upload and which of its rows are kept, or what is wrong with it."""
        if upload is None:
            return ""
        try:
            rows = self.fields["rows"].read(rows)
            codes = self.service.read_upload(upload)
            image = self.service.preview(codes)
        except Busy as busy:
            return views.busy(busy)
        except UserError as mistake:
            return views.failure(str(mistake))
        return views.given_stage(image, rows, of=self.service.generator.model.config.image_side)

    def estimate(self, num_images: int, best: int, guidance: float) -> str:
        """How long drawing takes with these settings."""
        name, count = ("best", best) if self.service.generator.scorer is None else ("num_images", num_images)
        try:
            return views.estimate(self.service, self.fields[name].read(count), self.fields["guidance"].read(guidance))
        except UserError as mistake:
            return views.failure(str(mistake))


def write_pictures(drawn: Done, folder: Path) -> list[Path]:
    """Write one PNG for each picture, with text chunks that tell how to draw it again.

    The file names hold nothing that a user typed.
    """
    request = drawn.request
    shared = prompt_metadata(request.prompt, drawn.described)
    paths = []
    for picture in drawn.pictures:
        path = folder / f"dalle_lean-seed{request.settings.seed}-no{picture.index}.png"
        path.write_bytes(png_bytes(picture.image, shared | picture_metadata(picture)))
        paths.append(path)
    return paths
