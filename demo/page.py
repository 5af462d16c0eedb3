"""The prompt page: a thin Gradio face over `demo.answer`."""

import os
import secrets
from collections.abc import Iterator
from typing import Any

from dalle_lean.require import require
from demo.answer import WELCOME, answer, facts, failure, line
from inference.generator import Generator, Settings

TITLE = "dalle_lean"
EXPLANATION = (
    "A small transformer draws your words code by code; CLIP looks at all the drawings and shows you the best."
)
EXAMPLES = (
    "a red heart",
    "a green book",
    "a yellow circle on a blue ground",
    "a cat on an orange ground",
    "a slice of pizza",
    "a blue car",
)
LARGEST_SEED = 2**31
NUM_IMAGES = 128
WAITING_LINE = 20
KEEP_FILES_S = 3600
CSS = """
.gradio-container { max-width: 1120px !important; width: 100%; margin: 0 auto; }
#title h1 { margin-bottom: 0; }
.status { min-height: 1.6em; display: flex; gap: .8em; align-items: center; }
.bar { flex: 1; height: .7em; border-radius: 1em; overflow: hidden; background: var(--background-fill-secondary); }
.bar div { height: 100%; background: var(--color-accent); transition: width .2s; }
.status.mistake { color: var(--error-text-color, #b91c1c); font-weight: 600; }
#status .html-container { padding: 0 2px; }
#gallery, #gallery .empty { min-height: 24em; }
#gallery .grid-wrap { max-height: none; overflow: visible; }
#facts { opacity: .75; font-size: .9em; }
footer .divider { display: none !important; }
"""


def build_page(generator: Generator, card: str = "") -> Any:
    """The page as Gradio Blocks; `card` is the model card in Markdown."""
    # Otherwise Gradio asks hosts of its own for versions.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", extra="demo")
    import gradio as gr

    def on_draw(prompt: str, *settings: Any) -> Iterator[Any]:
        yield from draw(generator, prompt, *settings)

    def on_open(request: gr.Request, *settings: Any) -> Iterator[Any]:
        """A page opened as /?prompt=a+red+heart&seed=3 draws it at once."""
        asked = request.query_params
        if "prompt" not in asked:
            yield gr.skip()
            return
        if asked.get("seed", "").isdecimal():
            settings = (*settings[:-2], int(asked["seed"]), False)
        for shown in draw(generator, asked["prompt"], *settings):
            yield asked["prompt"], *shown

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(KEEP_FILES_S, KEEP_FILES_S)) as page:
        gr.Markdown(f"# {TITLE}\n{EXPLANATION}", elem_id="title")
        with gr.Row(equal_height=True):
            prompt = gr.Textbox(
                placeholder=EXAMPLES[0],
                label="Prompt",
                show_label=False,
                container=False,
                autofocus=True,
                max_lines=1,
                scale=5,
                elem_id="prompt",
            )
            start = gr.Button("Draw", variant="primary", scale=1, min_width=100, elem_id="draw")
            stop = gr.Button("Stop", scale=1, min_width=80, elem_id="stop")
        gr.Examples(list(EXAMPLES), prompt, label="Try one of these")
        status = gr.HTML(line(WELCOME), padding=False, elem_id="status")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                gallery = gr.Gallery(
                    show_label=False,
                    columns=2,
                    height="auto",
                    object_fit="contain",
                    format="png",
                    elem_id="gallery",
                )
            with gr.Column(scale=1, min_width=300):
                settings = add_settings(generator)
        if card:
            with gr.Accordion("About the model", open=False):
                gr.Markdown(card)
        gr.Markdown(facts(generator), elem_id="facts")

        shown = [status, gallery, settings[-2]]
        one_at_a_time = {"concurrency_limit": 1, "concurrency_id": "draw", "show_progress": "hidden"}
        typed = gr.on(
            [prompt.submit, start.click], on_draw, [prompt, *settings], shown, api_name="draw", **one_at_a_time
        )
        opened = page.load(on_open, settings, [prompt, *shown], api_visibility="private", **one_at_a_time)
        stop.click(
            lambda: line("Stopped."), None, status, cancels=[typed, opened], queue=False, api_visibility="private"
        )
    page.queue(max_size=WAITING_LINE)
    return page


def add_settings(generator: Generator) -> list[Any]:
    """Put the controls on the page, in the order of `draw`'s arguments after the prompt."""
    import gradio as gr

    codes = generator.model.config.image_vocab_size
    ranked = generator.scorer is not None
    num_images = gr.Slider(1, 128, NUM_IMAGES, step=1, label="Draw", info="CLIP chooses among so many", visible=ranked)
    best = gr.Slider(1, 16, 4, step=1, label="Show the best" if ranked else "Draw")
    with gr.Accordion("Sampling", open=False):
        top_k = gr.Slider(
            0, codes, min(256, codes), step=1, label="Top-k", info="Each code is one of the k likeliest; 0 is off"
        )
        top_p = gr.Slider(
            0, 1, 0.75, step=0.01, label="Top-p", info="... of those with this share of the chance; 1 is off"
        )
        temperature = gr.Slider(
            0, 2, 1, step=0.05, label="Temperature", info="0 is always the likeliest code, above 1 is wilder"
        )
    seed = gr.Number(0, precision=0, minimum=0, label="Seed", info="The same seed draws the same pictures")
    new_seed = gr.Checkbox(True, label="A new seed each time")
    return [num_images, best, top_k, top_p, temperature, seed, new_seed]


def draw(
    generator: Generator,
    prompt: str,
    num_images: int,
    best: int,
    top_k: int,
    top_p: float,
    temperature: float,
    seed: int,
    new_seed: bool,
) -> Iterator[tuple[str, list[Any], int]]:
    """What the page shows from pressing Draw to the pictures: (status, gallery, seed), again and again."""
    if new_seed:
        seed = secrets.randbelow(LARGEST_SEED)
    yield line("Reading the prompt."), [], seed
    try:
        settings = Settings(
            num_images=num_images, best=best, top_k=top_k, top_p=top_p, temperature=temperature, seed=seed
        )
    except ValueError as mistake:
        yield failure(str(mistake)).status, [], seed
        return
    for view in answer(generator, prompt, settings):
        yield view.status, view.pictures, seed


def look() -> dict[str, Any]:
    """Theme and style sheet for `launch`; the fonts are the machine's own."""
    import gradio as gr

    theme = gr.themes.Default(
        primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    return {"theme": theme, "css": CSS}
