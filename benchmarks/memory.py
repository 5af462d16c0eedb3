"""What does backward cost in memory? `python -m benchmarks.memory`.

Three tables in fp32 on the CPU, by plan:

1. Bytes per token that a layer keeps for backward at the paper's width: what forward leaves allocated, from the
   difference between two depths; beside it, plain PyTorch layers of the same sizes, and figures of LeanTransformer.
2. What forward keeps, and the peak of forward and backward: two layers of the paper's model with its full vocabulary.
3. How both grow with depth, batch and length in a small model.

Bytes are exact (benchmarks/allocations.py). Weights, gradients and the batch exist before and do not count.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from benchmarks.allocations import Step, allocated, step_bytes
from benchmarks.reference import random_batch
from benchmarks.report import Column, make_parser, print_figures, print_json
from benchmarks.timing import in_turns
from benchmarks.training import REVERSIBLE, SEQUENTIAL, stream_name
from dalle_lean import Dalle, DalleConfig
from dalle_lean.memory import MemoryPlan

FLOAT_BYTES = 4
KB, MB = 1e3, 1e6

PAPER = dataclasses.replace(DalleConfig.paper(), num_layers=2)
"""A row and a convolution layer of the paper's model."""
ONE_KIND = {"attention_pattern": ("row",), "last_attention": None, "shared_blocks": 1}
"""Identical layers that share all weights, so that another layer adds no weights."""
PAPER_LAYERS = dataclasses.replace(PAPER, text_vocab_size=64, image_vocab_size=64, **ONE_KIND)  # type: ignore[arg-type]
SMALL = dataclasses.replace(
    PAPER_LAYERS, hidden_size=256, num_heads=4, text_len=64, image_side=16, text_vocab_size=1024, image_vocab_size=1024
)
BATCH_SIZES = (1, 2)
LONGER_SIDE = 24
PLANS = {True: REVERSIBLE, False: SEQUENTIAL}
LEAN_TRANSFORMER = {
    "LeanTransformer: backward by hand, its default": 15.0,
    "LeanTransformer: the same with post-norm": 17.0,
    "LeanTransformer: checkpoints": 2.0,
    "LeanTransformer: reversible": 0.0,
}
"""What a layer of learning-at-home/lean_transformer of these sizes keeps, in widths per token. Counted once with
saved-tensor hooks; not measured here."""

Figures = dict[str, Any]
Forward = Callable[[], Tensor]


class PlainLayer(nn.Module):
    """A pre-norm layer with a GEGLU feed-forward in plain PyTorch."""

    def __init__(self, width: int, heads: int, fused: bool):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, forbidden: Tensor) -> Tensor:
        """x [B, S, D], forbidden [S, S] -> [B, S, D]."""
        x = x + self.attend(self.attention_norm(x), forbidden)
        value, gate = self.up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(value * gelu(gate))
        return out

    def attend(self, x: Tensor, forbidden: Tensor) -> Tensor:
        """Causal attention, by torch's fused function or with an explicit softmax."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if self.fused:
            heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            heads = scores.masked_fill(forbidden, -torch.inf).softmax(dim=-1) @ value
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


def main() -> None:
    """Count, print the tables and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="default: all three")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {}
    for name, (title, measure, columns) in TABLES.items():
        if name in options.tables:
            figures[name] = measure()
            print(f"\n{title}")
            print_figures(figures[name], columns)
    print_json("memory", figures)


def counted(measures: dict[str, Callable[[], Figures]]) -> list[Figures]:
    """Run each measurement once, with a progress bar."""
    return [figures for [figures] in in_turns(measures, 1, "Counting").values()]


def layer_figures(config: DalleConfig, depths: tuple[int, int] = (2, 4)) -> list[Figures]:
    """Bytes that forward keeps per layer and token, from the difference between two depths."""
    width, tokens = config.hidden_size, config.sequence_len

    def per_layer(way: str, of_depth: Callable[[int], Forward]) -> Figures:
        shallow_bytes, deep_bytes = (allocated(of_depth(depth))[1] for depth in depths)
        live_bytes = (deep_bytes - shallow_bytes) / (depths[1] - depths[0]) / tokens
        return {"way": way, "widths": live_bytes / width / FLOAT_BYTES, "live_bytes": live_bytes}

    def ours(reversible: bool, plan: MemoryPlan, depth: int) -> Forward:
        return loss_of(Dalle(dataclasses.replace(config, num_layers=depth, reversible=reversible), plan), 1)

    ways: dict[str, Callable[[int], Forward]] = {
        "plain PyTorch, torch's attention": partial(plain_forward, config, True),
        "plain PyTorch, explicit softmax": partial(plain_forward, config, False),
    }
    for reversible, name, plan in all_plans():
        if not name.startswith("+"):  # pieces keep nothing more or less
            ways[f"{stream_name(reversible)}: {name}"] = partial(ours, reversible, plan)
    published = [{"way": way, "widths": widths} for way, widths in LEAN_TRANSFORMER.items()]
    return counted({way: partial(per_layer, way, of_depth) for way, of_depth in ways.items()}) + published


def plain_forward(config: DalleConfig, fused: bool, depth: int) -> Forward:
    """The forward of a stack of plain layers of the config's sizes, over random inputs that require gradients."""
    layers = nn.ModuleList(PlainLayer(config.hidden_size, config.num_heads, fused) for _ in range(depth))
    length = config.sequence_len
    x = torch.randn(1, length, config.hidden_size, requires_grad=True)
    forbidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward() -> Tensor:
        out = x
        for layer in layers:
            out = layer(out, forbidden)
        return out.sum()

    return forward


def all_plans() -> list[tuple[bool, str, MemoryPlan]]:
    """(reversible, name, plan) of everything compared."""
    return [(reversible, name, plan) for reversible, plans in PLANS.items() for name, plan in plans.items()]


def peak_figures(config: DalleConfig, batch_sizes: tuple[int, ...]) -> list[Figures]:
    """Bytes that forward keeps, and the peak of the step, by plan and batch size."""

    def peak(reversible: bool, name: str, plan: MemoryPlan, size: int) -> Figures:
        model = Dalle(dataclasses.replace(config, reversible=reversible), plan)
        step = step_bytes(loss_of(model, size), model.parameters())
        return {"function": stream_name(reversible), "way": name, "batch_size": size, **step._asdict()}

    return counted(
        {
            f"{stream_name(way[0])}: {way[1]}, batch {size}": partial(peak, *way, size)
            for way in all_plans()
            for size in batch_sizes
        }
    )


def growth_figures(
    config: DalleConfig, longer_side: int, depths: tuple[int, int] = (4, 8), batch_size: int = 4
) -> list[Figures]:
    """Bytes that each further layer, sample and position add to what forward keeps and to the peak, by plan."""
    units = {
        "layer": (depths[1] - depths[0], {"depth": depths[1]}),
        "sample": (batch_size, {"size": 2 * batch_size}),
        "position": (longer_side**2 - config.image_side**2, {"side": longer_side}),
    }

    def growth(reversible: bool, name: str, plan: MemoryPlan) -> Figures:
        def measured(depth: int = depths[0], size: int = batch_size, side: int = config.image_side) -> Step:
            larger = dataclasses.replace(config, num_layers=depth, image_side=side, reversible=reversible)
            model = Dalle(larger, plan)
            return step_bytes(loss_of(model, size), model.parameters())

        start = measured()
        line: Figures = {"function": stream_name(reversible), "way": name}
        for unit, (count, more) in units.items():
            step = measured(**more)
            line[f"kept_bytes_a_{unit}"] = (step.kept_bytes - start.kept_bytes) / count
            line[f"peak_bytes_a_{unit}"] = (step.peak_bytes - start.peak_bytes) / count
        return line

    return counted({f"{stream_name(way[0])}: {way[1]}": partial(growth, *way) for way in all_plans()})


def loss_of(model: Dalle, batch_size: int) -> Callable[[], Tensor]:
    """The loss of one random batch."""
    batch = random_batch(model.config, batch_size)
    return lambda: model.loss(batch["text_ids"], batch["image_codes"])


KEPT_AND_PEAK = ("kept", "peak")
BY_PLAN = (Column("function", "function"), Column("plan", "way"))
TABLES: dict[str, tuple[str, Callable[[], list[Figures]], tuple[Column, ...]]] = {
    "layers": (
        "Kept for backward by a layer, per token; what has no bytes was not measured here",
        lambda: layer_figures(PAPER_LAYERS),
        (Column("layer", "way"), Column("widths", "widths", ".2f"), Column("bytes", "live_bytes", ",.0f")),
    ),
    "peaks": (
        "Two layers of the paper's model, MB",
        lambda: peak_figures(PAPER, BATCH_SIZES),
        (
            *BY_PLAN,
            Column("batch", "batch_size"),
            *(Column(what, f"{what}_bytes", ",.1f", MB) for what in KEPT_AND_PEAK),
        ),
    ),
    "growth": (
        "Growth in a small model, kB",
        lambda: growth_figures(SMALL, LONGER_SIDE),
        (
            *BY_PLAN,
            *(
                Column(f"{what}, a {unit}", f"{what}_bytes_a_{unit}", ",.2f", KB)
                for unit in ("layer", "sample", "position")
                for what in KEPT_AND_PEAK
            ),
        ),
    ),
}
"""Title, measurement and columns."""

if __name__ == "__main__":
    main()
