"""The prompt page: its layout, and which event calls which action."""

import json
import os
from types import SimpleNamespace
from typing import Any

import gradio as gr

from dalle_lean.images.files import FORMATS
from demo import progress_views as views
from demo.actions import KEPT_S, Actions
from demo.calculator.page import add_calculator
from demo.endpoint import add_endpoint
from demo.form import default_settings, prompt_fields
from demo.service.drawing_service import DrawingService

TITLE = "dalle_lean"
EXAMPLES = (
    "a red heart",
    "a panda",
    "a smiling face with sunglasses",
    "a dog on a green ground",
    "three red hearts on a pink ground",
    "a house on a pink ground",
    "an astronaut riding a horse",
)
"""Prompts that the bundled model draws well; the last is beyond it."""


def build_page(service: DrawingService, card: str, api: bool) -> Any:
    """The page as Gradio Blocks; `card` is the model card in Markdown, `api` adds the endpoint /draw."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # or Gradio asks another host for its latest version
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(KEPT_S, KEPT_S)) as page:
        parts, examples = add_parts(service, card=bool(card))
        if api:  # first, so that it gets the name /draw: Gradio names every listener
            add_endpoint(service, parts)
        connect(page, parts, examples, Actions(service, parts, EXAMPLES))
    with page.route("Calculator", "calculator", show_in_navbar=False):
        add_calculator()
    if card:
        with page.route("Model card", "card", show_in_navbar=False):
            gr.Markdown(card, elem_id="card")
    page.queue(default_concurrency_limit=None)  # the service does the scheduling
    return page


def add_parts(service: DrawingService, card: bool) -> tuple[SimpleNamespace, Any]:
    """Lay out the page from top to bottom; returns its components by name, and the examples."""
    parts = SimpleNamespace()
    links = "[About this model](card) · " * card + "[What training takes](calculator)"
    gr.Markdown(f"# {TITLE}\n{views.explanation(service.generator)} {links}", elem_id="title")
    with gr.Row(elem_id="ask"):
        parts.prompt = gr.Textbox(
            placeholder="What would you like to see?",
            label="Prompt",
            show_label=False,
            container=False,
            autofocus=True,
            max_lines=1,
            scale=5,
            min_width=200,
            elem_id="prompt",
        )
        parts.draw = gr.Button("Draw", variant="primary", scale=1, min_width=90, elem_id="draw")
        parts.stop = gr.Button("Stop", scale=1, min_width=90, interactive=False, elem_id="stop")
    examples = gr.Examples(list(EXAMPLES), parts.prompt, label="Try one of these; the last is beyond the bundled model")
    parts.status = gr.HTML(views.welcome(service), padding=False, elem_id="status")
    # That the prompt was cut, and the words that the model has not learnt.
    parts.unknown = gr.HTML(padding=False, elem_id="unknown")
    # Takes the place of the gallery until the pictures are done.
    parts.stage = gr.HTML(views.empty_stage(), padding=False, elem_id="stage")
    parts.gallery = gr.Gallery(
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
    with gr.Row(visible=False, elem_id="actions") as parts.actions:
        parts.download = gr.DownloadButton("Download", min_width=150, size="md", elem_id="download")
        parts.more = gr.Button("More like this", min_width=150, size="md", elem_id="more")
        parts.keep = gr.Button("Keep this seed", min_width=150, size="md", elem_id="keep")
    add_controls(service, parts)
    gr.Markdown(views.facts(service.generator), elem_id="facts")
    return parts, examples


def add_controls(service: DrawingService, parts: SimpleNamespace) -> None:
    """Add the controls in two accordions; those of `read_request`'s arguments are in `parts.inputs`, by name."""
    config, ranked = service.generator.model.config, service.generator.scorer is not None
    defaults, fields = default_settings(service), prompt_fields(config, ranked)
    inputs = parts.inputs = {}

    def slider(name: str, info: str, **options: Any) -> None:
        field = fields[name]
        options |= {"step": field.step, "label": field.label, "info": info}
        inputs[name] = gr.Slider(field.lowest, field.highest, defaults[name], **options)

    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            slider("num_images", views.advice(service), visible=ranked, elem_id="num-images")
            slider("best", "How many to show", elem_id="best")
        parts.estimate = gr.HTML(views.estimate(service, service.default_drawn()), elem_id="estimate")
        with gr.Row():
            slider("top_k", "Sample each code from the k most likely; 0 is off")
            slider("top_p", "... and from those that make up this probability; 1 is off")
        with gr.Row():
            slider("temperature", "0 always takes the most likely code; above 1 is more random")
            slider("guidance", "Above 1 follows the prompt more closely and takes twice as long")
        with gr.Row():
            info = "The same seed draws the same pictures"
            inputs["seed"] = gr.Number(0, minimum=0, label=fields["seed"].label, info=info, elem_id="seed")
            parts.new_seed = gr.Checkbox(True, label="New seed each time", elem_id="new-seed")
    with gr.Accordion("Continue a picture", open=False, elem_id="continue"), gr.Row():
        with gr.Column(min_width=260):
            inputs["upload"] = gr.File(
                label="Picture whose upper rows are kept",
                file_types=[f".{name.lower()}" for name in (*FORMATS, "jpg", "tif")],
                type="binary",
                height=140,
                elem_id="upload",
            )
            info = f"How many of the {config.image_side} rows of codes to keep, from the top; also for “More like this”"
            slider("rows", info, elem_id="rows")
        with gr.Column(min_width=240):
            parts.given = gr.HTML(elem_id="given")


def connect(page: Any, parts: SimpleNamespace, examples: Any, actions: Actions) -> None:
    inputs = parts.inputs
    shown = [
        *(parts.prompt, parts.stop, parts.status, parts.unknown, parts.stage, parts.gallery, parts.actions),
        *(parts.download, parts.more, inputs["seed"], parts.new_seed),
    ]
    slow = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
    quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    drawing = {**slow, "trigger_mode": "multiple"}
    values = [parts.prompt, parts.new_seed, *inputs.values()]
    # Runs in the browser, which may have no connection left for this tab: it opens few to one host.
    asked = [parts.prompt.submit, parts.draw.click, parts.more.click, examples.dataset.click]
    gr.on(asked, None, None, parts.status, js=f"() => {json.dumps(views.asked())}", **quick)
    gr.on([parts.prompt.submit, parts.draw.click], actions.draw, values, shown, **drawing)
    examples.load_input_event.then(actions.draw, values, shown, **drawing)
    parts.more.click(actions.draw_more, [parts.prompt, *inputs.values()], shown, **drawing)
    greeted = [parts.status, parts.estimate, inputs["num_images"]]
    greeting = page.load(actions.greet, None, greeted, **quick)
    greeting.then(actions.open, values[1:], shown, **drawing)
    # Shown by the browser: the server's answer might come after the drawing's last words.
    stopping = f"() => [{json.dumps(views.stopping())}, {{__type__: 'update', interactive: false}}]"
    parts.stop.click(None, None, [parts.status, parts.stop], js=stopping, **quick)
    parts.stop.click(actions.stop, None, None, **quick, trigger_mode="multiple")  # an earlier answer may be on its way
    parts.gallery.select(actions.choose, None, shown, **quick)
    parts.keep.click(actions.keep_seed, None, shown, **quick)
    upload = [inputs["upload"], inputs["rows"]]
    gr.on([inputs["upload"].change, inputs["rows"].release], actions.preview_upload, upload, parts.given, **slow)
    cost = [inputs["num_images"], inputs["best"], inputs["guidance"]]
    gr.on([control.change for control in cost], actions.estimate, cost, parts.estimate, **quick)
