"""The prompt page's controls: components without behaviour."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from dalle_lean.images.files import FORMATS
from demo import progress_views as views
from demo.form import HIGHEST_TEMPERATURE, MOST_BEST, MOST_IMAGES, default_rows, default_settings
from demo.service.drawing_service import HIGHEST_GUIDANCE, LOWEST_GUIDANCE, DrawingService


@dataclass(frozen=True)
class Controls:
    """The components that a visitor sets, and those that respond to them."""

    inputs: dict[str, Any]
    """The fields of `demo.form.FormValues`, in their order."""
    new_seed: Any
    estimate: Any
    given: Any


def add_controls(service: DrawingService) -> Controls:
    """Add the controls to the page, in two accordions."""
    side, codes = service.generator.model.config.image_side, service.generator.model.config.image_vocab_size
    defaults = {**default_settings(service), "rows": default_rows(service)}
    ranked = service.generator.scorer is not None
    inputs: dict[str, Any] = {}

    def slider(name: str, lowest: float, highest: float, step: float, label: str, info: str, **options: Any) -> None:
        inputs[name] = gr.Slider(lowest, highest, defaults[name], step=step, label=label, info=info, **options)

    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            advice = views.advice(service)
            slider("num_images", 1, MOST_IMAGES, 1, "Candidates", advice, visible=ranked, elem_id="num-images")
            slider(
                "best", 1, MOST_BEST, 1, "Show the best" if ranked else "Pictures", "How many to show", elem_id="best"
            )
        estimate = gr.HTML(views.estimate(service, defaults["num_images" if ranked else "best"]), elem_id="estimate")
        with gr.Row():
            slider("top_k", 0, codes, 1, "Top-k", "Sample each code from the k most likely; 0 is off")
            slider("top_p", 0, 1, 0.01, "Top-p", "... and from those that make up this probability; 1 is off")
        with gr.Row():
            info = "0 always takes the most likely code; above 1 is more random"
            slider("temperature", 0, HIGHEST_TEMPERATURE, 0.05, "Temperature", info)
            info = "Above 1 follows the prompt more closely and takes twice as long"
            slider("guidance", LOWEST_GUIDANCE, HIGHEST_GUIDANCE, 0.25, "Guidance", info)
        with gr.Row():
            info = "The same seed draws the same pictures"
            inputs["seed"] = gr.Number(0, precision=0, minimum=0, label="Seed", info=info, elem_id="seed")
            new_seed = gr.Checkbox(True, label="New seed each time", elem_id="new-seed")
    with gr.Accordion("Continue a picture", open=False, elem_id="continue"), gr.Row():
        with gr.Column(min_width=260):
            inputs["upload"] = gr.File(
                label="Picture whose upper rows are kept",
                file_types=[f".{name.lower()}" for name in (*FORMATS, "jpg", "tif")],
                type="binary",
                height=140,
                elem_id="upload",
            )
            info = f"How many of the {side} rows of codes to keep, from the top; also for “More like this”"
            slider("rows", 1, side - 1, 1, "Rows kept", info, elem_id="rows")
        with gr.Column(min_width=240):
            given = gr.HTML(elem_id="given")
    return Controls(inputs, new_seed, estimate, given)
