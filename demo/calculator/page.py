"""The calculator's page: a model, its settings, and stacked bars of its memory with and without them."""

from dataclasses import astuple, replace
from typing import Any

import gradio as gr
import pandas as pd

from dalle_lean.errors import UserError
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.report import CostReport
from dalle_lean.memory.setup import PRECISIONS, STATISTICS
from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.words import human, human_bytes
from demo.calculator.switches import (
    PLAIN,
    Switches,
    activation_choices,
    default_switches,
    model_names,
    report_with,
    sharing_choices,
)
from demo.form import Field
from training.run.subjects import find_subject

GPU_GB = 8.0
GPU = Field("GPU memory, GB", 1, 10_000, step=0.1)
BATCH = Field("Batch", 1, 1_000_000)
TOKENS = Field("Tokens per sample", 1, 1_000_000)
LONGEST_RECIPE = 20_000  # characters
BEFORE, AFTER, HOST = "plain", "as chosen", "on the CPU"
COLOURS = {
    "weights": "#4c78a8",
    "gradients": "#f58518",
    "optimizer state": "#e45756",
    "activations": "#54a24b",
    "backward of one layer": "#88d27a",
    "logits": "#b279a2",
    "gradients being summed": "#ffbf79",
    "low-precision weights, position table": "#72b7b2",
    "float32 copies of weights": "#9ecae9",
    "transfer to the optimizer": "#bab0ac",
}
ADVICE = """
The computed size of all tensors at the peak of a step; a GPU's context (about 0.5 GB) and fragmentation come on top.
*Plain* is float32, 32-bit AdamW, all activations kept, no shared weights. BERT, T5 and the GPTs are priced as plain
PyTorch code with torch's attention; if reversible, as `dalle_lean.language` runs its layers. On the command line:
`dalle-lean calculator`.
"""


def add_calculator(name: str = "paper") -> None:
    """Add the calculator to the enclosing Blocks; UserError if there is no model `name`."""
    default, subject = default_switches(name), find_subject(name)
    names = model_names() if name in model_names() else [name, *model_names()]
    gr.Markdown("# What training takes\nChoose a model and settings, and see what fills the memory in a step.")
    with gr.Row():
        choices = [(title(known), known) for known in names]
        model = gr.Dropdown(choices, value=name, label="Model", scale=3, min_width=240, elem_id="model")
        positive: dict[str, Any] = {"minimum": 1, "min_width": 110}
        gpu = gr.Number(GPU_GB, label=GPU.label, maximum=GPU.highest, elem_id="gpu", **positive)
        batch = gr.Number(subject.setup.batch, label=BATCH.label, maximum=BATCH.highest, elem_id="batch", **positive)
        tokens = gr.Number(**tokens_of(name), label=TOKENS.label, elem_id="tokens", **positive)
    with gr.Row():
        info = "bf16 and fp16 are mixed precision"
        precision = gr.Radio(list(PRECISIONS), value=default.precision, label="Precision", info=info)
        info = "8-bit: two bytes per weight"
        optimizer = gr.Radio(list(STATISTICS), value=default.optimizer, label="Optimizer", info=info)
    with gr.Row():
        activations = gr.Radio(
            activation_choices(name), value=default.activations, label="Activations", info="Kept or recomputed"
        )
        info = "Sets of weights that the layers share"
        sharing = gr.Dropdown(sharing_choices(name), value=default.sharing, label="Sharing", info=info)
        info = "LAMB's statistics on the CPU"
        offload = gr.Checkbox(default.offload, label="Offload", info=info, min_width=160, elem_id="offload")
    said, data, table, most = show(name, GPU_GB, subject.setup.batch, subject.tokens, *astuple(default))
    summary = gr.Markdown(said, elem_id="summary")
    plot = gr.BarPlot(
        data,
        x="where",
        y="GB",
        color="kind",
        color_map=COLOURS,
        colors_in_legend=[],  # a legend is cut off on a phone; the table below is one
        x_title=" ",
        sort=[BEFORE, AFTER, HOST],
        height=340,
        label="Memory by kind",
        show_label=False,
        elem_id="plot",
    )
    kinds = gr.Markdown(table, sanitize_html=False, elem_id="kinds")
    holds = gr.Markdown(most, elem_id="holds")
    gr.Markdown(ADVICE)
    with gr.Accordion("Your own recipe", open=False, elem_id="own"):
        recipe = gr.Textbox(
            label="TOML, as for `train --config`",
            lines=8,
            max_lines=20,
            max_length=LONGEST_RECIPE,
            placeholder="[model]\nnum_layers = 16\nhidden_size = 512",
            elem_id="recipe",
        )
        use = gr.Button("Show what it takes", elem_id="use")
    inputs: list[Any] = [model, gpu, batch, tokens, precision, optimizer, offload, activations, sharing]
    outputs = [summary, plot, kinds, holds]
    quick: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last"}
    model.input(change_model, [model, gpu], [*inputs[2:], *outputs], **quick)
    use.click(add_recipe, [recipe, gpu], [model, *inputs[2:], *outputs], **quick)
    gr.on([control.input for control in inputs[1:]], show, inputs, outputs, **quick)


def title(name: str) -> str:
    """A model's name and size."""
    subject = find_subject(name)
    count = subject.cost(subject.plan, subject.setup).parameters
    size = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
    return f"{subject.name}: {size}"


def tokens_of(name: str) -> dict[str, Any]:
    """The field of tokens per sample, which is fixed for all but published transformers."""
    subject = find_subject(name)
    return {"value": subject.tokens, "interactive": isinstance(subject.model, TransformerShape)}


def change_model(name: str, gpu_gb: float) -> list[Any]:
    """The default settings of another model, and what they cost."""
    default, subject = default_switches(name), find_subject(name)
    fields = [
        subject.setup.batch,
        gr.update(**tokens_of(name)),
        default.precision,
        default.optimizer,
        default.offload,
        gr.update(choices=activation_choices(name), value=default.activations),
        gr.update(choices=sharing_choices(name), value=default.sharing),
    ]
    return [*fields, *show(name, gpu_gb, subject.setup.batch, subject.tokens, *astuple(default))]


def add_recipe(text: str, gpu_gb: float) -> list[Any]:
    """Add a visitor's recipe as the last model, and show what it costs; the summary names any mistake."""
    text = text.strip() + "\n"
    try:
        if len(text) > LONGEST_RECIPE:
            raise UserError(f"the recipe has {len(text):,} characters; the limit is {LONGEST_RECIPE:,}")
        choices = [(title(known), known) for known in (*model_names(), text)]
    except UserError as error:
        return [*[gr.skip()] * 8, f"**Not possible:** {error}", None, "", ""]
    return [gr.update(choices=choices, value=text), *change_model(text, gpu_gb)]


def show(
    name: str, gpu_gb: float | None, batch: float | None, tokens: float | None, *fields: Any
) -> tuple[str, pd.DataFrame | None, str, str]:
    """Summary, bars, table of kinds and table of what the GPU holds; after a mistake, a summary that names it alone."""
    switches, model = Switches(*fields), find_subject(name).model
    try:
        gpu_gb = GPU.read(gpu_gb)
        lengths = {"batch": BATCH.read(batch)}
        if isinstance(model, TransformerShape):
            lengths["tokens"] = replace(TOKENS, highest=model.learnt_positions or TOKENS.highest).read(tokens)
        plain, chosen = (report_with(name, each, gpu_gb, **lengths) for each in (PLAIN, switches))
        shown = columns(plain, chosen)
        return summarise(plain, chosen), bars(shown), kinds_table(shown), holds_table(gpu_gb, switches)
    except UserError as error:
        return f"**Not possible:** {error}", None, "", ""


def summarise(plain: CostReport, chosen: CostReport) -> str:
    """Memory, largest batches, arithmetic and parameters in a few sentences."""
    cost, host = chosen.cost, chosen.cost.host.total
    before, after = (human(each.cost.step.total, "FLOP") for each in (plain, chosen))
    more = f", and {human_bytes(host)} on the CPU" if host else ""
    count = f"{cost.parameters:,} parameters"
    if cost.parameters < plain.cost.parameters:
        count += f" instead of {plain.cost.parameters:,}"
    return (
        f"**{chosen.priced.name}**, batch {chosen.setup.batch}, {chosen.priced.tokens} tokens per sample: "
        f"**{human_bytes(plain.cost.peak_bytes)}** plain, **{human_bytes(cost.peak_bytes)}** as chosen{more}. "
        f"A GPU of {human_bytes(chosen.budget_bytes or 0)} holds {batches(plain)} plain and {batches(chosen)} "
        f"as chosen. A step takes {before} plain and {after} as chosen, with {count}."
    )


def batches(report: CostReport) -> str:
    """The largest batch in words."""
    return f"a batch of {report.largest_batch:,}" if report.largest_batch else "not even one sample"


def columns(plain: CostReport, chosen: CostReport) -> dict[str, dict[str, int]]:
    """Bytes by kind for each bar."""
    shown = {BEFORE: plain.cost.device, AFTER: chosen.cost.device}
    if chosen.cost.host.total:
        shown[HOST] = chosen.cost.host
    return {where: parts.by_kind() for where, parts in shown.items()}


def bars(shown: dict[str, dict[str, int]]) -> pd.DataFrame:
    """A row for each bar and each kind in it."""
    rows = [(where, kind, count / 1e9) for where, parts in shown.items() for kind, count in parts.items() if count]
    return pd.DataFrame(rows, columns=["where", "kind", "GB"])


def kinds_table(shown: dict[str, dict[str, int]]) -> str:
    """The bars' numbers, and what their colours mean."""
    rows = []
    for kind, colour in COLOURS.items():
        counts = [parts[kind] for parts in shown.values()]
        if any(counts):
            square = f'<span style="color: {colour}">■</span>'
            rows.append([f"{square} {kind}", *(human_bytes(count) if count else "" for count in counts)])
    rows.append(["sum", *(human_bytes(sum(parts.values())) for parts in shown.values())])
    return markdown_table(["", *shown], rows)


def holds_table(gpu_gb: float, switches: Switches) -> str:
    """The largest batch of each published model and of the paper's on this GPU."""
    rows = []
    for name in (*PRESETS, "paper"):
        try:
            rows.append([name, *(f"{report_with(name, each, gpu_gb).largest_batch:,}" for each in (PLAIN, switches))])
        except UserError:
            rows.append([name, f"{report_with(name, PLAIN, gpu_gb).largest_batch:,}", "not possible"])
    return f"### Largest batch in {gpu_gb:g} GB\n\n{markdown_table(['', BEFORE, AFTER], rows)}"


def markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown whose first column is aligned left, the others right."""
    lines = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
