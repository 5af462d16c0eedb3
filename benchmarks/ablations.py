"""Which decoder learns most in little time? `python -m benchmarks.ablations SHARDS HELDOUT OUT [NAME ...]`.

Short runs of the recipe emoji64 on pictures of 16x16 codes, each with one or two changes, on the same shards with the
same seed: held-out bits per image code on the way, and samples per second. Each is a run of `dalle-lean train`, and
continues if it was stopped. The variants named, by default all, run one after the other, so that two processes with
different names can share two cores with --threads 1. At the end a table of all finished runs is printed, and
OUT/curves.svg drawn.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import Column, make_parser, print_figures, print_json
from dalle_lean import load_model
from dalle_lean.draw.svg_plot import plot
from dalle_lean.terminal import progress_bar
from training.run.metrics import read_metrics
from training.run.recipe import Recipe, load_recipe
from training.trainer import train

Sections = dict[str, dict[str, Any]]

BASE = "the recipe emoji64 with 16x16 codes"
VARIANTS: dict[str, Sections] = {
    BASE: {},
    "nothing tied, feed-forward 3": {"model": {"shared_blocks": None, "ffn_multiplier": 3}},
    "nothing tied, 5 layers of 240": {
        "model": {"shared_blocks": None, "hidden_size": 240, "head_size": 60, "num_layers": 5}
    },
    "nothing tied, 12 layers of 144": {
        "model": {"shared_blocks": None, "hidden_size": 144, "head_size": 36, "num_layers": 12}
    },
    "one layer in four sees everything": {"model": {"attention_pattern": ("row", "column", "row", "full")}},
    "no token shift": {"model": {"token_shift": False}},
    "learning rate 3e-3": {"schedule": {"peak_lr": 3e-3}},
    "nothing tied, feed-forward 3, learning rate 6e-3": {
        "model": {"shared_blocks": None, "ffn_multiplier": 3},
        "schedule": {"peak_lr": 6e-3},
    },
    "nothing tied, feed-forward 3, learning rate 3e-3, one residual stream": {
        "model": {"shared_blocks": None, "ffn_multiplier": 3, "reversible": False},
        "schedule": {"peak_lr": 3e-3},
    },
    "batch 16": {"data": {"batch_size": 16}},
    "8-bit LAMB, learning rate 1e-2": {"optimizer": {"name": "lamb"}, "schedule": {"peak_lr": 1e-2}},
    "captions dropped for 10 %": {"data": {"caption_dropout": 0.1}},
    "squares of 8x8 codes in the first half": {"schedule": {"length_warmup": ((2200, 24, 8),)}},
}
SAMPLES = 9600
MEASURED_AT = (0.25, 0.5, 0.75, 1.0)
"""Shares of the steps, 0..1."""


def variant(name: str, samples: int = SAMPLES) -> Recipe:
    """The recipe of a variant, for `samples` samples."""
    sections = load_recipe("emoji64").to_dict()
    sections["model"] |= {"image_side": 16}
    for section, changes in VARIANTS[name].items():
        sections[section] |= changes
    recipe = Recipe.from_dict(sections)
    steps = samples // recipe.data.batch_size
    schedule = dataclasses.replace(
        recipe.schedule.with_steps(steps),
        warmup_steps=steps // 10,
        heldout_every=steps // len(MEASURED_AT),
        sample_every=0,
        checkpoint_every=steps // 8,
    )
    return dataclasses.replace(recipe, schedule=schedule)


def folder(out: Path, name: str) -> Path:
    """The folder of a variant's run."""
    return out / "".join(letter if letter.isalnum() else "-" for letter in name)


def figures(out: Path, name: str, samples: int) -> dict[str, Any] | None:
    """A run's held-out bits on the way, samples/s and parameters; None unless it has measured its last step."""
    lines = read_metrics(folder(out, name) / "metrics.jsonl")
    last = variant(name, samples).schedule.total_steps
    bits = {line["step"] / last: line["heldout_image_bits"] for line in lines if "heldout_image_bits" in line}
    if max(bits, default=0.0) != 1.0:  # unfinished, or a run of more samples
        return None
    model = load_model(folder(out, name) / "model")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "samples_per_s": median(line["samples_per_s"] for line in lines if "samples_per_s" in line),
        "bits": {round(share, 2): value for share, value in bits.items()},
    }


def curves(found: Mapping[str, Mapping[str, Any]], samples: int) -> str:
    """An SVG on white: held-out bits by samples seen, the best run first."""
    named = {
        f"{each['bits'][1.0]:.3f} {name}": [(share * samples, bits) for share, bits in each["bits"].items()]
        for name, each in sorted(found.items(), key=lambda item: item[1]["bits"][1.0])
    }
    bits = [value for points in named.values() for _, value in points]
    svg = plot(
        named,
        across="samples seen",
        up="held-out bits per image code",
        up_range=(min(bits), max(bits)),
        up_text="{:.2f}".format,
        legend_width=470,
    )
    return svg.replace("<svg ", '<svg style="background: white; color: black" ', 1) + "\n"


def main() -> None:
    """Run the variants named, then report all that are finished."""
    parser = make_parser(__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants to run (default: all)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_intermixed_args()
    out, samples, names = options.out, options.samples, options.names or list(VARIANTS)
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    for name in names:
        if variant(name, samples).schedule.total_steps % len(MEASURED_AT):
            parser.error(f"--samples {samples}: the steps of {name!r} are no multiple of {len(MEASURED_AT)}")
    torch.set_num_threads(options.threads)
    for name in names:
        with progress_bar(name, "samples") as on_progress:
            recipe = variant(name, samples)
            train(options.shards, folder(out, name), recipe, heldout=options.heldout, on_progress=on_progress)
    found = {name: each for name in VARIANTS if (each := figures(out, name, samples)) is not None}
    columns = (
        Column("changed", "changed"),
        Column("M parameters", "parameters", ".2f", 1e6),
        *(Column(f"after {share:.0%}", str(share), ".3f") for share in MEASURED_AT),
        Column("samples/s", "samples_per_s", ".1f"),
    )
    lines = [
        {"changed": name, **each, **{str(share): bits for share, bits in each["bits"].items()}}
        for name, each in found.items()
    ]
    print_figures(lines, columns)
    (out / "curves.svg").write_text(curves(found, samples))
    print_json("ablations", {"samples": samples, "variants": found})


if __name__ == "__main__":
    main()
