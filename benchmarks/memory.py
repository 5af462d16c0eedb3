"""What does backward cost in memory? `python -m benchmarks.memory`.

Three tables in fp32 on the CPU, by plan:

1. What a layer keeps for backward, per token, at the paper's width: by live storages (what forward leaves allocated)
   and by saved-tensor hooks (unique storages that are not parameters), from the difference between two depths. Beside
   it plain PyTorch layers of the same sizes, and what is published of LeanTransformer.
2. What forward keeps, and the peak of forward and backward: two layers of the paper's model with all its vocabulary.
3. How both grow with depth, batch and length, in a small model.

Bytes are exact (benchmarks/allocations.py). Weights, gradients and the batch exist before and do not count.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from benchmarks.allocations import Step, allocated, hooked_bytes, step_bytes
from benchmarks.plans import REVERSIBLE, SEQUENTIAL
from benchmarks.report import print_json, print_table
from dalle_lean import Dalle, DalleConfig
from dalle_lean.memory import MemoryPlan
from dalle_lean.terminal import progress_bar

FLOAT_BYTES = 4
KB, MB = 1e3, 1e6

PAPER = dataclasses.replace(DalleConfig.paper(), num_layers=2)
"""A row and a convolution layer of the paper's model."""
ONE_KIND = {"attention_pattern": ("row",), "last_attention": None, "shared_blocks": 1}
"""Layers that are all alike and share all weights, so that another layer adds no weights."""
PAPER_LAYERS = dataclasses.replace(PAPER, text_vocab_size=64, image_vocab_size=64, **ONE_KIND)  # type: ignore[arg-type]
SMALL = dataclasses.replace(
    PAPER_LAYERS, hidden_size=256, num_heads=4, text_len=64, image_side=16, text_vocab_size=1024, image_vocab_size=1024
)
BATCH_SIZES = (1, 2)
LONGER_SIDE = 24
TABLES = ("layers", "peaks", "growth")
PLANS = {True: REVERSIBLE, False: SEQUENTIAL}
LEAN_TRANSFORMER = {
    "LeanTransformer: backward by hand, its default": 15.0,
    "LeanTransformer: the same with post-norm": 17.0,
    "LeanTransformer: checkpoints": 2.0,
    "LeanTransformer: reversible": 0.0,
}
"""What the design of learning-at-home/lean_transformer keeps, in widths per token: its own layer of these sizes,
counted once by saved-tensor hooks; not measured here."""

OnStep = Callable[[], None]


class PlainLayer(nn.Module):
    """A pre-norm layer with a GEGLU feed-forward as one writes it in plain PyTorch."""

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
        """Causal attention: torch's own, or with an explicit softmax."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="default: all three")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ways = sum(len(plans) for plans in PLANS.values())
    steps = {
        "layers": 2 + sum(len(whole(plans)) for plans in PLANS.values()),
        "peaks": ways * len(BATCH_SIZES),
        "growth": ways,
    }
    total = sum(steps[name] for name in options.tables)
    measure: dict[str, Callable[[OnStep], list[dict[str, Any]]]] = {
        "layers": lambda on_step: layer_figures(PAPER_LAYERS, on_step),
        "peaks": lambda on_step: peak_figures(PAPER, BATCH_SIZES, on_step),
        "growth": lambda on_step: growth_figures(SMALL, LONGER_SIDE, on_step),
    }
    with progress_bar("Counting", "steps") as on_progress:
        done = iter(range(1, total + 1))

        def on_step() -> None:
            on_progress(next(done), total, "")

        figures = {name: measure[name](on_step) for name in TABLES if name in options.tables}
    for name, lines in figures.items():
        {"layers": print_layers, "peaks": print_peaks, "growth": print_growth}[name](lines)
    print_json("memory", figures)


def whole(plans: dict[str, MemoryPlan]) -> dict[str, MemoryPlan]:
    """The plans without pieces: pieces keep nothing more or less."""
    return {name: plan for name, plan in plans.items() if not name.startswith("+")}


def layer_figures(config: DalleConfig, on_step: OnStep, depths: tuple[int, int] = (2, 4)) -> list[dict[str, Any]]:
    """Bytes per layer and token that forward keeps, from the difference between two depths."""
    width, tokens = config.hidden_size, config.sequence_len
    figures = []

    def add(way: str, of_depth: Callable[[int], tuple[Callable[[], Tensor], nn.Module]]) -> None:
        live, hooked = [], []
        for depth in depths:
            forward, model = of_depth(depth)
            live.append(allocated(forward)[1])
            hooked.append(hooked_bytes(forward, model.parameters()))
        both = {"live_bytes": live, "hooked_bytes": hooked}
        per_token = {name: (b - a) / (depths[1] - depths[0]) / tokens for name, (a, b) in both.items()}
        figures.append({"way": way, "widths": per_token["live_bytes"] / width / FLOAT_BYTES, **per_token})
        on_step()

    for fused, name in ((True, "torch's attention"), (False, "explicit softmax")):
        add(f"plain PyTorch, {name}", lambda depth, fused=fused: plain_forward(config, depth, fused))  # type: ignore[misc]
    figures += [
        {"way": way, "widths": widths, "live_bytes": widths * width * FLOAT_BYTES}
        for way, widths in LEAN_TRANSFORMER.items()
    ]
    for reversible, plans in PLANS.items():
        for name, plan in whole(plans).items():

            def of_depth(depth: int, reversible: bool = reversible, plan: MemoryPlan = plan) -> Any:
                model = Dalle(dataclasses.replace(config, num_layers=depth, reversible=reversible), plan)
                return loss_of(model, 1), model

            add(f"{stream_name(reversible)}: {name}", of_depth)
    return figures


def plain_forward(config: DalleConfig, depth: int, fused: bool) -> tuple[Callable[[], Tensor], nn.Module]:
    """A stack of plain layers of the config's sizes over random inputs that want a gradient."""
    layers = nn.ModuleList(PlainLayer(config.hidden_size, config.num_heads, fused) for _ in range(depth))
    length = config.sequence_len
    x = torch.randn(1, length, config.hidden_size, requires_grad=True)
    forbidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward() -> Tensor:
        out = x
        for layer in layers:
            out = layer(out, forbidden)
        return out.sum()

    return forward, layers


def peak_figures(config: DalleConfig, batch_sizes: tuple[int, ...], on_step: OnStep) -> list[dict[str, Any]]:
    """Bytes that forward keeps and the peak of the step, by plan and batch size."""
    figures = []
    for reversible, plans in PLANS.items():
        model = Dalle(dataclasses.replace(config, reversible=reversible))
        for name, plan in plans.items():
            model.plan = plan
            for size in batch_sizes:
                step = step_bytes(loss_of(model, size), model.parameters())
                figures.append({"reversible": reversible, "way": name, "batch_size": size, **step._asdict()})
                on_step()
    return figures


def growth_figures(
    config: DalleConfig, longer_side: int, on_step: OnStep, depths: tuple[int, int] = (4, 8), batch_size: int = 4
) -> list[dict[str, Any]]:
    """Bytes that another layer, sample and position add to what forward keeps and to the peak, by plan."""
    figures = []
    for reversible, plans in PLANS.items():
        for name, plan in plans.items():

            def measured(depth: int, size: int, side: int, plan: MemoryPlan = plan, two: bool = reversible) -> Step:
                model = Dalle(dataclasses.replace(config, num_layers=depth, image_side=side, reversible=two), plan)
                return step_bytes(loss_of(model, size), model.parameters())

            start = measured(depths[0], batch_size, config.image_side)
            layers = depths[1] - depths[0]
            positions = longer_side**2 - config.image_side**2
            line: dict[str, Any] = {"reversible": reversible, "way": name}
            for unit, count, step in (
                ("layer", layers, measured(depths[1], batch_size, config.image_side)),
                ("sample", batch_size, measured(depths[0], 2 * batch_size, config.image_side)),
                ("position", positions, measured(depths[0], batch_size, longer_side)),
            ):
                line[f"kept_bytes_a_{unit}"] = (step.kept_bytes - start.kept_bytes) / count
                line[f"peak_bytes_a_{unit}"] = (step.peak_bytes - start.peak_bytes) / count
            figures.append(line)
            on_step()
    return figures


def loss_of(model: Dalle, batch_size: int) -> Callable[[], Tensor]:
    """The loss of one random batch."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    text_ids = torch.randint(config.text_vocab_size, (batch_size, config.text_len), generator=generator)
    image_codes = torch.randint(config.image_vocab_size, (batch_size, config.image_len), generator=generator)
    return lambda: model.loss(text_ids, image_codes)


def stream_name(reversible: bool) -> str:
    """What the two functions are called in the tables."""
    return "reversible" if reversible else "sequential"


def print_layers(figures: list[dict[str, Any]]) -> None:
    """Table 1."""
    print("\nKept for backward by a layer, per token")
    rows = [
        (
            line["way"],
            f"{line['widths']:.2f}",
            f"{line['live_bytes']:,.0f}",
            f"{line['hooked_bytes']:,.0f}" if "hooked_bytes" in line else "not measured here",
        )
        for line in figures
    ]
    print_table(("layer", "widths", "bytes, by live storages", "bytes, by hooks"), rows)


def print_peaks(figures: list[dict[str, Any]]) -> None:
    """Table 2."""
    print("\nTwo layers of the paper's model, MB")
    sizes = sorted({line["batch_size"] for line in figures})
    header = ["function", "plan", *(f"{what}, batch {size}" for what in ("kept", "peak") for size in sizes)]
    by_way: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for line in figures:
        by_way.setdefault((stream_name(line["reversible"]), line["way"]), {})[line["batch_size"]] = line
    rows = [
        (*way, *(f"{of_size[size][name] / MB:,.1f}" for name in ("kept_bytes", "peak_bytes") for size in sizes))
        for way, of_size in by_way.items()
    ]
    print_table(header, rows)


def print_growth(figures: list[dict[str, Any]]) -> None:
    """Table 3."""
    print("\nGrowth in a small model, kB")
    units = [f"{what}_bytes_a_{unit}" for unit in ("layer", "sample", "position") for what in ("kept", "peak")]
    header = ("function", "plan", *(unit.replace("_bytes_a_", ", a ") for unit in units))
    rows = [
        (stream_name(line["reversible"]), line["way"], *(f"{line[unit] / KB:,.2f}" for unit in units))
        for line in figures
    ]
    print_table(header, rows)


if __name__ == "__main__":
    main()
