"""What benchmarks.scale computes with: figures quoted from BENCHMARKS.md, assumptions, and the cost of models."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model
from dalle_lean.memory.flops import forward_flop
from dalle_lean.memory.report import PricedModel
from training.run.subjects import find_subject
from training.swarm.config import TimingSection, WireSection


def measured(section: str, quote: str, unit: float = 1.0) -> Any:
    """A figure from a section of BENCHMARKS.md: the number in the quote's braces, times `unit`."""
    before, _, rest = quote.partition("{")
    number, _, after = rest.partition("}")
    value = float(number.replace(",", "")) * unit
    return field(default=value, metadata={"section": section, "quote": before + number + after})


def assumed(value: float, reason: str) -> Any:
    """A figure that was not measured: what is asked for, a price, a default, or a guess."""
    return field(default=float(value), metadata={"reason": reason})


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures; the rates of links are for each direction."""

    pictures: float = assumed(1e8, "asked")
    volunteers: float = assumed(1000, "asked")
    prompts_per_day: float = assumed(1e6, "asked")
    preprocess_days: float = assumed(7, "asked: for this many days preprocessing may run")
    candidates: float = assumed(16, "asked: drawn for a prompt")
    kept: float = assumed(4, "asked: sent for a prompt")
    peak_factor: float = assumed(3, "assumed: prompts of the busiest hour, in those of a mean one")
    passes: float = assumed(1, "assumed: how often training sees a picture")
    file_bytes: float = assumed(1e5, "assumed: of a picture as it is downloaded")
    caption_bytes: float = assumed(60, "assumed: caption and key in a shard, compressed")
    png_share: float = assumed(
        0.6, "assumed: PNG of a photograph, in raw pixels; drawings were measured, see png_bytes"
    )
    joins_per_day: float = assumed(2, "assumed: downloads of the state by a volunteer")
    link_bit_per_s: float = assumed(1e9, "assumed: preprocessing machine, host, donor, engine")
    uplink_bit_per_s: float = assumed(2e7, "assumed: a volunteer's")
    clip_threads: float = assumed(2, "assumed: one for each of the host's two helpers")
    front_s_per_prompt: float = assumed(0.05, "assumed: processor time of the front, which has one core")
    gpu_flop_per_s: float = assumed(2e13, "assumed: reached in all three jobs")
    samples_per_step: float = assumed(4096, "default: the paper's recipe")
    diloco_steps: float = assumed(WireSection().inner_steps, "default: steps between two rounds of DiLoCo")
    matchmaking_s: float = assumed(TimingSection().matchmaking_time_s, "default")
    matchmakings_per_round: float = assumed(5, "rule of host-your-own.md: a round lasts at least as long")
    cpu_dollars_per_hour: float = assumed(0.08, "invented price: two cores")
    gpu_dollars_per_hour: float = assumed(0.40, "invented price")
    server_dollars_per_hour: float = assumed(0.20, "invented price: host, donor or front")
    storage_dollars_per_gb_month: float = assumed(0.02, "invented price")
    egress_dollars_per_gb: float = assumed(0.01, "invented price; some charge 0.09")

    preprocess_pictures_per_s: float = measured(
        "The three jobs", "| preprocess: read, filter, encode, write | {79} pictures/s"
    )
    train_samples_per_s: float = measured(
        "The three jobs", "| train: 8.66 M parameters, batch 32, bf16, Muon | {26} samples/s |"
    )
    draw_pictures_per_s: float = measured("The three jobs", "| generate: draw 64, decode, rank | {11} pictures/s |")
    decode_s: float = measured("Preprocessing", "so decoding, {0.39} ms,", 1e-3)
    row_bytes: float = measured("Bytes of codes", "4,096 pictures of `make data` 998,466 and {862,704}", 1 / 4096)
    paper_sample_s: float = measured(
        "Training: time and memory", "| in pieces: 8 heads, 640 tokens, gradients in place | {71.3} |"
    )
    cpu_flop_per_s: float = measured(
        "Training: time and memory", "the matrix product alone reaches {162} GFLOP/s here", 1e9
    )
    statistics_bytes: float = measured("8-bit LAMB", "| LAMB 8-bit, compiled (numba) | 507 (498 to 522) | {2.007} |")
    round_models: float = measured("Training together", "| DiLoCo, 8 bits, 50 inner steps | 5.92 | {0.67} |")
    talk_bytes: float = measured("Training together", "peers on slow links sent {5.0} MB a step in all", 1e6 / 6)
    efficiency: float = measured("Training together", "| 4 | 57.7 | {90} % (aim: 90) |", 0.01)
    clip_s_per_value: float = measured(
        "Training together", "20 ms for a part of 524,288 values of 4 senders, {50} ms for 10", 1e-3 / 10 / 524_288
    )
    clip_s_per_pair_value: float = measured(
        "Training together", "{52} ms of the 225 are the distances between all pairs", 1e-3 / 40**2 / 524_288
    )
    rank_s: float = measured(
        "Sampling", "| 128 | fp32 | 8,049 | 21.06 | 12.7 | 13.68 | 2.23 | 1.69 | {0.14} |", 1 / 128
    )
    png_bytes: float = measured("Its data and its tokenizer", "| Fluent Emoji Flat | MIT | 25.5 | {5,879} |")


def source(spec: "dataclasses.Field[float]", f: Figures) -> str:
    """The source of a figure, for a table."""
    if getattr(f, spec.name) != spec.default:
        return "given"
    if "reason" in spec.metadata:
        return str(spec.metadata["reason"])
    section, quote = spec.metadata["section"], spec.metadata["quote"].replace("|", "\\|")
    anchor = "".join(sign for sign in section.lower().replace(" ", "-") if sign.isalnum() or sign == "-")
    return f"measured, [{section}](../BENCHMARKS.md#{anchor}): {quote.strip()}"


@dataclass(frozen=True)
class Model:
    """What a model and its pictures cost."""

    parameters: int
    codes: int
    codebook_size: int
    picture_side: int
    encode_flop: float
    draw_flop: float
    """For a picture, including guidance and decoding."""
    sample_flop: float
    """For a training step at batch 1."""
    peak_bytes: int
    """Of such a step on a GPU."""


@dataclass(frozen=True)
class Case:
    """A model on a kind of machine: its rates, its price, and the bytes of a picture."""

    title: str
    model: Model
    encoded_per_s: float
    samples_per_s: float
    drawn_per_s: float
    dollars_per_hour: float
    row_bytes: float
    png_bytes: float


def model_of(priced: PricedModel, vqgan: VQGAN, *, guided: bool) -> Model:
    """FLOP by the calculator, and for the VQGAN by torch's counter on the meta device."""
    config, side = priced.model, vqgan.config.picture_side
    with FlopCounterMode(display=False) as encoding:
        latents = vqgan.latents(torch.empty(1, 3, side, side, device="meta"))
    with FlopCounterMode(display=False) as decoding:
        vqgan.pixels(latents)
    cost = priced.cost(priced.plan, dataclasses.replace(priced.setup, batch=1, device="cuda"))
    return Model(
        parameters=cost.parameters,
        codes=config.image_len,
        codebook_size=config.image_vocab_size,
        picture_side=side,
        encode_flop=encoding.get_total_flops(),
        draw_flop=(2 if guided else 1) * forward_flop(config, 1).total + decoding.get_total_flops(),
        sample_flop=cost.step.total,
        peak_bytes=cost.peak_bytes,
    )


@cache
def models() -> tuple[Model, Model]:
    """The bundled model, drawn with guidance as measured, and the paper's."""
    bundled_vqgan = VQGAN.load(bundled_model() / "vqgan").to("meta")
    with torch.device("meta"):
        paper_vqgan = VQGAN(VQGANConfig())
    return (
        model_of(find_subject(str(bundled_model())), bundled_vqgan, guided=True),
        model_of(find_subject("paper"), paper_vqgan, guided=False),
    )


def cases(f: Figures) -> list[Case]:
    """The bundled model as measured; the paper's by its FLOP; the paper's on a GPU, at rates that were not measured."""
    bundled, paper = models()
    encoded_per_s = f.preprocess_pictures_per_s * bundled.encode_flop / paper.encode_flop
    drawn_per_s = f.draw_pictures_per_s * bundled.draw_flop / paper.draw_flop
    speed_up = f.gpu_flop_per_s / f.cpu_flop_per_s
    on_gpu = (encoded_per_s * speed_up, f.gpu_flop_per_s / paper.sample_flop, drawn_per_s * speed_up)
    as_measured = (f.preprocess_pictures_per_s, f.train_samples_per_s, f.draw_pictures_per_s)
    codes_bytes = paper.codes * math.log2(paper.codebook_size) / 8  # assumed incompressible
    weights = (f.caption_bytes + codes_bytes, f.png_share * 3 * paper.picture_side**2)
    cpu, gpu = f.cpu_dollars_per_hour, f.gpu_dollars_per_hour
    return [
        Case("bundled model, two cores", bundled, *as_measured, cpu, f.row_bytes, f.png_bytes),
        Case("paper's, two cores", paper, encoded_per_s, 1 / f.paper_sample_s, drawn_per_s, cpu, *weights),
        Case("paper's, a GPU", paper, *on_gpu, gpu, *weights),
    ]
