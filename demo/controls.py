"""The controls of the prompt page: components, no behaviour."""

from dataclasses import dataclass
from typing import Any

from dalle_lean.images.files import FORMATS
from demo import progress_views as views
from demo.form import (
    HIGHEST_TEMPERATURE,
    MOST_BEST,
    MOST_IMAGES,
    default_rows,
    default_settings,
)
from demo.service.drawing_service import HIGHEST_GUIDANCE, LOWEST_GUIDANCE, DrawingService


@dataclass(frozen=True)
class Controls:
    """The fields of `demo.form.FormValues`, in their order, and what only the page needs."""

    num_images: Any
    best: Any
    top_k: Any
    top_p: Any
    temperature: Any
    guidance: Any
    seed: Any
    upload: Any
    rows: Any
    new_seed: Any
    estimate: Any
    given: Any

    def inputs(self) -> list[Any]:
        """Those of FormValues."""
        return [
            *(self.num_images, self.best, self.top_k, self.top_p, self.temperature, self.guidance),
            *(self.seed, self.upload, self.rows),
        ]


def add_controls(service: DrawingService) -> Controls:
    """Put them on the page, in two folds."""
    import gradio as gr

    side = service.generator.model.config.image_side
    codes = service.generator.model.config.image_vocab_size
    defaults = default_settings(service)
    ranked = service.generator.scorer is not None
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            num_images = gr.Slider(
                *(1, MOST_IMAGES, defaults["num_images"]),
                step=1,
                label="Candidates",
                info=views.advice(service),
                visible=ranked,
                elem_id="num-images",
            )
            best = gr.Slider(
                *(1, MOST_BEST, defaults["best"]),
                step=1,
                label="Show the best" if ranked else "Pictures",
                info="So many of them are shown",
                elem_id="best",
            )
        estimate = gr.HTML(views.estimate(service, defaults["num_images" if ranked else "best"]), elem_id="estimate")
        with gr.Row():
            top_k = gr.Slider(
                *(0, codes, defaults["top_k"]),
                step=1,
                label="Top-k",
                info="Each code is one of the k likeliest; 0 is off",
            )
            top_p = gr.Slider(
                *(0, 1, defaults["top_p"]),
                step=0.01,
                label="Top-p",
                info="... of those that make up this share of the chance; 1 is off",
            )
        with gr.Row():
            temperature = gr.Slider(
                *(0, HIGHEST_TEMPERATURE, defaults["temperature"]),
                step=0.05,
                label="Temperature",
                info="0 is always the likeliest code, above 1 is wilder",
            )
            guidance = gr.Slider(
                *(LOWEST_GUIDANCE, HIGHEST_GUIDANCE, defaults["guidance"]),
                step=0.25,
                label="Guidance",
                info="Above 1 keeps closer to the prompt and takes twice as long",
            )
        with gr.Row():
            seed = gr.Number(
                0, precision=0, minimum=0, label="Seed", info="The same seed draws the same pictures", elem_id="seed"
            )
            new_seed = gr.Checkbox(True, label="A new seed each time", elem_id="new-seed")
    with gr.Accordion("Continue a picture", open=False, elem_id="continue"), gr.Row():
        with gr.Column(min_width=260):
            upload = gr.File(
                label="Picture whose upper part is kept",
                file_types=[f".{name.lower()}" for name in (*FORMATS, "jpg", "tif")],
                type="binary",
                height=140,
                elem_id="upload",
            )
            rows = gr.Slider(
                *(1, side - 1, default_rows(service)),
                step=1,
                label="Rows kept",
                info=f"Of the {side} rows of codes, from the top; for “More like this” too",
                elem_id="rows",
            )
        with gr.Column(min_width=240):
            given = gr.HTML(elem_id="given")
    return Controls(
        *(num_images, best, top_k, top_p, temperature, guidance, seed, upload, rows),
        new_seed=new_seed,
        estimate=estimate,
        given=given,
    )
