"""The calculator's page: a model, switches, and a stacked bar of its memory without and with them."""

from dataclasses import astuple
from typing import Any

import gradio as gr
import pandas as pd

from dalle_lean.errors import UserError
from dalle_lean.memory.plan_search import human_bytes
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.report import CostReport, human_flop
from dalle_lean.memory.setup import PRECISIONS, STATISTICS
from dalle_lean.memory.shapes import TransformerShape
from demo.calculator.switches import (
    PLAIN,
    Switches,
    activation_choices,
    model_names,
    own_switches,
    report_with,
    sharing_choices,
)
from training.run.subjects import find_subject

GPU_GB = 8.0
MOST_BATCH = 1_000_000
LONGEST_RECIPE = 20_000
"""Characters."""
BEFORE, AFTER, HOST = "plain", "switched", "on the CPU"
COLOURS = {
    "weights": "#4c78a8",
    "gradients": "#f58518",
    "optimizer state": "#e45756",
    "activations": "#54a24b",
    "layer": "#88d27a",
    "logits": "#b279a2",
    "gradient buffers": "#ffbf79",
    "copies": "#72b7b2",
    "master weights": "#9ecae9",
    "transfer": "#bab0ac",
}
ADVICE = """
Bytes of tensors at the worst moment of a step, computed; a GPU's context (about 0.5 GB) and fragmentation come on top.
*Plain* is float32, 32-bit AdamW, all activations kept, nothing shared. BERT, T5 and the GPTs are priced as written in
plain PyTorch with torch's attention; reversible, as `dalle_lean.language` runs its layers. On the command line:
`dalle-lean calculator`.
"""


def add_calculator(name: str = "paper") -> None:
    """Put the calculator into the Blocks or the Tab around; ValueError where there is no such model."""
    own, subject = own_switches(name), find_subject(name)
    names = model_names() if name in model_names() else [name, *model_names()]
    gr.Markdown("# What training takes\nChoose a model and flip switches: see the memory of a step by kind.")
    with gr.Row():
        choices = [(title(known), known) for known in names]
        model = gr.Dropdown(choices, value=name, label="Model", scale=3, min_width=240, elem_id="model")
        gpu = gr.Number(GPU_GB, label="GPU memory, GB", minimum=1, maximum=10_000, min_width=110, elem_id="gpu")
        whole: dict[str, Any] = {"precision": 0, "minimum": 1, "min_width": 110}
        batch = gr.Number(subject.setup.batch, label="Batch", maximum=MOST_BATCH, elem_id="batch", **whole)
        tokens = gr.Number(**tokens_of(name), label="Tokens a sample", elem_id="tokens", **whole)
    with gr.Row():
        precision = gr.Radio(list(PRECISIONS), value=own.precision, label="Precision", info="Mixed: bf16 or fp16")
        optimizer = gr.Radio(list(STATISTICS), value=own.optimizer, label="Optimizer", info="8-bit: two bytes a weight")
    with gr.Row():
        activations = gr.Radio(
            activation_choices(name), value=own.activations, label="Activations", info="Kept, or computed again"
        )
        info = "Sets of weights that layers take in turns"
        sharing = gr.Dropdown(sharing_choices(name), value=own.sharing, label="Sharing", info=info)
        info = "LAMB's statistics on the CPU"
        offload = gr.Checkbox(own.offload, label="Offload", info=info, min_width=160, elem_id="offload")
    said, data, table, most = show(name, GPU_GB, subject.setup.batch, None, *astuple(own))
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
    with gr.Accordion("A recipe of your own", open=False, elem_id="own"):
        recipe = gr.Textbox(
            label="Its TOML, as `train --config` takes it",
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
    """The field of tokens: fixed where the model's samples always have as many."""
    subject = find_subject(name)
    return {"value": subject.tokens, "interactive": isinstance(subject.model, TransformerShape)}


def change_model(name: str, gpu_gb: float) -> list[Any]:
    """Another model's own settings, and what they cost."""
    own, batch = own_switches(name), find_subject(name).setup.batch
    fields = [
        batch,
        gr.update(**tokens_of(name)),
        own.precision,
        own.optimizer,
        own.offload,
        gr.update(choices=activation_choices(name), value=own.activations),
        gr.update(choices=sharing_choices(name), value=own.sharing),
    ]
    return [*fields, *show(name, gpu_gb, batch, None, *astuple(own))]


def add_recipe(text: str, gpu_gb: float) -> list[Any]:
    """The recipe of a visitor, as the last of the models, and what it costs; a mistake is the summary."""
    text = text.strip() + "\n"
    try:
        if len(text) > LONGEST_RECIPE:
            raise UserError(f"the recipe has {len(text):,} characters; {LONGEST_RECIPE:,} are read at most")
        choices = [(title(known), known) for known in (*model_names(), text)]
    except UserError as error:
        return [*[gr.skip()] * 8, f"**Not possible:** {error}", None, "", ""]
    return [gr.update(choices=choices, value=text), *change_model(text, gpu_gb)]


def show(
    name: str, gpu_gb: float | None, batch: int | None, tokens: int | None, *switched: Any
) -> tuple[str, pd.DataFrame | None, str, str]:
    """Summary, bars, table of kinds and table of what the GPU holds; a mistake is the summary, with nothing else."""
    switches = Switches(*switched)
    lengths = {"batch": batch, "tokens": tokens if isinstance(find_subject(name).model, TransformerShape) else None}
    try:
        if gpu_gb is None:
            raise UserError("how much memory has the GPU?")
        plain, with_them = (report_with(name, way, gpu_gb, **lengths) for way in (PLAIN, switches))
        return (
            summarise(plain, with_them),
            bars(plain, with_them),
            kinds_table(plain, with_them),
            holds_table(gpu_gb, switches),
        )
    except UserError as error:
        return f"**Not possible:** {error}", None, "", ""


def summarise(plain: CostReport, switched: CostReport) -> str:
    """What it comes to, in a few sentences."""
    cost, host = switched.cost, switched.cost.host.total
    more = f", and {human_bytes(host)} on the CPU" if host else ""
    count = f"{cost.parameters:,} parameters"
    if cost.parameters < plain.cost.parameters:
        count += f" in place of {plain.cost.parameters:,}"
    return (
        f"**{switched.priced.name}**, batch {switched.setup.batch}, {switched.priced.tokens} tokens a sample: "
        f"**{human_bytes(plain.cost.peak_bytes)}** plain, **{human_bytes(cost.peak_bytes)}** switched{more}. "
        f"A GPU of {human_bytes(switched.budget_bytes or 0)} holds {batches(plain)} plain and {batches(switched)} "
        f"switched. A step is {human_flop(plain.cost.step.total)} plain and {human_flop(cost.step.total)} switched, "
        f"with {count}."
    )


def batches(report: CostReport) -> str:
    """The largest batch in words."""
    return f"a batch of {report.largest_batch:,}" if report.largest_batch else "not one sample"


def columns(plain: CostReport, switched: CostReport) -> dict[str, dict[str, int]]:
    """Bytes by kind, of each bar."""
    shown = {BEFORE: plain.cost.device, AFTER: switched.cost.device}
    if switched.cost.host.total:
        shown[HOST] = switched.cost.host
    return {
        where: {kind.replace("_", " "): count for kind, count in parts.by_kind().items()}
        for where, parts in shown.items()
    }


def bars(plain: CostReport, switched: CostReport) -> pd.DataFrame:
    """A row for each kind that there is, of each bar."""
    rows = [
        (where, kind, count / 1e9)
        for where, parts in columns(plain, switched).items()
        for kind, count in parts.items()
        if count
    ]
    return pd.DataFrame(rows, columns=["where", "kind", "GB"])


def kinds_table(plain: CostReport, switched: CostReport) -> str:
    """The bars' numbers and what their colours mean."""
    shown = columns(plain, switched)
    rows = []
    for kind, colour in COLOURS.items():
        counts = [parts[kind] for parts in shown.values()]
        if any(counts):
            square = f'<span style="color: {colour}">■</span>'
            rows.append([f"{square} {kind}", *(human_bytes(count) if count else "" for count in counts)])
    rows.append(["sum", *(human_bytes(sum(parts.values())) for parts in shown.values())])
    return markdown_table(["", *shown], rows)


def holds_table(gpu_gb: float, switches: Switches) -> str:
    """The largest batch of every published model, and of the paper's, in this GPU."""
    rows = []
    for name in (*PRESETS, "paper"):
        try:
            rows.append([name, *(f"{report_with(name, way, gpu_gb).largest_batch:,}" for way in (PLAIN, switches))])
        except UserError:
            rows.append([name, f"{report_with(name, PLAIN, gpu_gb).largest_batch:,}", "cannot have these"])
    return f"### Largest batch in {gpu_gb:g} GB\n\n{markdown_table(['', BEFORE, AFTER], rows)}"


def markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    """Words to the left, numbers to the right."""
    lines = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
