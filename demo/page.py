"""The prompt page: where things are, and what sets off what."""

import os
from collections.abc import Iterator
from typing import Any

from dalle_lean.require import require
from demo import progress_views as views
from demo.actions import Actions, Parts, Update
from demo.controls import add_controls
from demo.endpoint import add_endpoint
from demo.form import LONGEST_PROMPT, default_settings
from demo.service.drawing_service import DrawingService

TITLE = "dalle_lean"
EXAMPLES = (
    "a red heart",
    "a smiling face",
    "a crying face on a blue ground",
    "a big purple heart on a yellow ground",
    "a green circle left of a red heart on a white ground",
    "a small green apple in the top right corner on a pink ground",
    "an astronaut riding a horse",
)
"""What the bundled model does well, and last what is beyond it."""
KEEP_S = 3600


def build_page(service: DrawingService, card: str = "", api: bool = True) -> Any:
    """The page as Gradio Blocks; `card` is the model card in Markdown, `api` adds the endpoint /draw."""
    # Otherwise Gradio asks hosts of its own for versions.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", extra="demo")
    import gradio as gr

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(KEEP_S, KEEP_S)) as page:
        parts, examples = add_parts(service, card=bool(card))
        # First, so that it gets the name: Gradio names every listener.
        if api:
            add_endpoint(service, parts)
        connect(page, parts, examples, Actions(service, parts, EXAMPLES))
    if card:
        with page.route("Model card", "card", show_in_navbar=False):
            gr.Markdown(card, elem_id="card")
    # The service serves and queues; Gradio only carries.
    page.queue(default_concurrency_limit=None)
    return page


def add_parts(service: DrawingService, card: bool) -> tuple[Parts, Any]:
    """Put everything on the page, from top to bottom."""
    import gradio as gr

    link = " [About this model](card)" if card else ""
    gr.Markdown(f"# {TITLE}\n{views.explanation(service.generator)}{link}", elem_id="title")
    with gr.Row(elem_id="ask"):
        prompt = gr.Textbox(
            placeholder="What shall be drawn?",
            label="Prompt",
            show_label=False,
            container=False,
            autofocus=True,
            max_lines=1,
            max_length=LONGEST_PROMPT,
            scale=5,
            min_width=200,
            elem_id="prompt",
        )
        draw = gr.Button("Draw", variant="primary", scale=1, min_width=90, elem_id="draw")
        stop = gr.Button("Stop", scale=1, min_width=90, interactive=False, elem_id="stop")
    examples = gr.Examples(list(EXAMPLES), prompt, label="Try one of these; the last is beyond the bundled model")
    num_images = default_settings(service)["num_images" if service.generator.scorer else "best"]
    status = gr.HTML(views.welcome(service, num_images), padding=False, elem_id="status")
    unknown = gr.HTML(padding=False, elem_id="unknown")
    stage = gr.HTML(views.empty_stage(), padding=False, elem_id="stage")
    gallery = gr.Gallery(
        show_label=False,
        columns=4,
        height="auto",
        object_fit="contain",
        format="png",
        buttons=["fullscreen"],
        interactive=False,
        visible=False,
        elem_id="gallery",
    )
    with gr.Row(visible=False, elem_id="actions") as actions:
        download = gr.DownloadButton("Download", min_width=150, size="md", elem_id="download")
        more = gr.Button("More like this", min_width=150, size="md", elem_id="more")
        keep = gr.Button("Keep this seed", min_width=150, size="md", elem_id="keep")
    controls = add_controls(service)
    gr.Markdown(views.facts(service.generator), elem_id="facts")
    drawn = gr.State(None, time_to_live=KEEP_S)
    chosen = gr.State(0, time_to_live=KEEP_S)
    looks = (prompt, draw, stop, status, unknown, stage, gallery, actions, download, more, keep)
    parts = Parts(*looks, controls, drawn, chosen)
    return parts, examples


def connect(page: Any, parts: Parts, examples: Any, actions: Actions) -> None:
    """What sets off what."""
    import gradio as gr

    def on_draw(request: gr.Request, *values: Any) -> Iterator[Update]:
        yield from actions.draw(visitor(request), *values)

    def on_more(request: gr.Request, *values: Any) -> Iterator[Update]:
        yield from actions.draw_more(visitor(request), *values)

    def on_open(request: gr.Request, *values: Any) -> Iterator[Update]:
        yield from actions.open(visitor(request), dict(request.query_params), *values)

    def on_stop(request: gr.Request) -> Update:
        return actions.stop(visitor(request))

    def on_choose(event: gr.SelectData, drawn: Any) -> Iterator[Update]:
        yield from actions.choose(event.index, drawn)

    controls = parts.controls
    shown = [
        *(parts.prompt, parts.stop, parts.status, parts.unknown, parts.stage, parts.gallery, parts.actions),
        *(parts.download, parts.more, parts.drawn, parts.chosen, controls.seed, controls.new_seed),
    ]
    slow = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
    quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    values = [parts.prompt, controls.new_seed, *controls.inputs()]
    liked = [parts.prompt, parts.drawn, parts.chosen, *controls.inputs()]
    drawing = {**slow, "trigger_mode": "multiple"}
    gr.on([parts.prompt.submit, parts.draw.click], on_draw, values, shown, **drawing)
    examples.load_input_event.then(on_draw, values, shown, **drawing)
    parts.more.click(on_more, liked, shown, **drawing)
    page.load(on_open, values[1:], shown, **drawing)
    parts.stop.click(on_stop, None, shown, **quick)
    parts.gallery.select(on_choose, parts.drawn, shown, **quick)
    parts.keep.click(actions.keep_seed, parts.drawn, shown, **quick)
    upload = [controls.upload, controls.rows]
    gr.on([controls.upload.change, controls.rows.release], actions.look_at_upload, upload, controls.given, **slow)
    cost = [controls.num_images, controls.best, controls.guidance]
    gr.on([control.change for control in cost], actions.estimate, cost, controls.estimate, **quick)


def visitor(request: Any) -> str:
    """One for each open tab."""
    return str(request.session_hash)
