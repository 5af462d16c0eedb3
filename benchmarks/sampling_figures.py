"""What a sampling run found: figures of each batch size and precision, and tables of them."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.drawing import Drawing, Painting
from benchmarks.matmul_chain import step_bytes, step_flop
from benchmarks.reference import REFERENCE
from benchmarks.report import print_table
from dalle_lean import Dalle, DalleConfig
from inference.sampling.packed_linear import Precision

REFERENCE_BATCH = 8
WAYS = ("shipped", "mended")
MS, MB = 1e-3, 1e6
Column = tuple[str, str, str, float]
"""Title, figure, format and unit."""


class Turn(NamedTuple):
    """One batch size in one round."""

    batch: int
    bare_s: float
    """A step of the bare chain."""
    packed_s: dict[Precision, float]
    """A step of each packed one."""
    drawings: dict[Precision, Drawing]
    painting: Painting
    reference: dict[str, dict[str, float]]
    """What each way of the reference answered; empty at other batch sizes and where there is none."""


def judge_drawing(model: Dalle, turns: list[Turn], limits: dict[str, float]) -> list[dict[str, Any]]:
    """The figures of each batch size and precision."""
    num_codes = model.config.image_len
    num_steps = num_codes - 1
    figures = []
    for batch in dict.fromkeys(turn.batch for turn in turns):
        own = [turn for turn in turns if turn.batch == batch]
        for precision in own[0].drawings:
            drawings = [turn.drawings[precision] for turn in own]
            step_s = median(drawing.steps for drawing in drawings) / num_steps
            shares = [turn.bare_s * num_steps / turn.drawings[precision].seconds for turn in own]
            figures.append(
                {
                    "batch": batch,
                    "precision": precision,
                    "codes_per_s": median(batch * num_codes / drawing.seconds for drawing in drawings),
                    "pictures_per_s": median(
                        batch / (turn.drawings[precision].seconds + sum(turn.painting)) for turn in own
                    ),
                    "prefill_s": median(drawing.prefill for drawing in drawings),
                    "step_s": step_s,
                    "sampling_s": median(drawing.sampling for drawing in drawings) / num_codes,
                    "decode_s": median(turn.painting.decode for turn in own),
                    "clip_s": median(turn.painting.score for turn in own),
                    "cache_bytes": drawings[0].cache_bytes,
                    "bare_chain_s": median(turn.bare_s for turn in own),
                    "packed_chain_s": median(turn.packed_s[precision] for turn in own),
                    "of_bare_chain": median(shares),
                    "of_bare_chain_rounds": shares,
                    "step_of_bare_chain": median(
                        turn.bare_s * num_steps / turn.drawings[precision].steps for turn in own
                    ),
                    "step_of_packed_chain": median(
                        turn.packed_s[precision] * num_steps / turn.drawings[precision].steps for turn in own
                    ),
                    "matmul_rate_reached": step_flop(model, batch) / step_s / limits[f"matmul_{precision}_flop_per_s"],
                    "bandwidth_reached": step_bytes(model, precision, batch) / step_s / limits["bandwidth_bytes_per_s"],
                }
            )
    return figures


def judge_reference(config: DalleConfig, turns: list[Turn]) -> list[dict[str, Any]]:
    """The figures of each way of the reference, and how many times as fast and as small ours is in each precision."""
    own = [turn for turn in turns if turn.reference]
    figures = []
    for way in own[0].reference if own else ():
        theirs = [turn.reference[way] for turn in own]
        line: dict[str, Any] = {
            "way": way,
            "batch": REFERENCE_BATCH,
            "codes_per_s": REFERENCE_BATCH / median(answer["seconds"] for answer in theirs),
            "cache_bytes": theirs[0]["cache_bytes"],
        }
        for precision in own[0].drawings:
            ratios = [
                turn.reference[way]["seconds"] * config.image_len / turn.drawings[precision].seconds for turn in own
            ]
            line[f"speed_up_{precision}"] = median(ratios)
            line[f"speed_up_{precision}_rounds"] = ratios
            if line["cache_bytes"]:
                line[f"cache_less_by_{precision}"] = line["cache_bytes"] / own[0].drawings[precision].cache_bytes
        figures.append(line)
    return figures


def report(figures: dict[str, Any]) -> None:
    """The tables."""
    drawing, reference = figures["drawing"], figures["reference"]
    columns: tuple[Column, ...]
    print(
        "\nDrawing; prefill, decoding and CLIP for all pictures at once, a step and its sampling for one code of each"
    )
    columns = (
        ("codes/s", "codes_per_s", ",.0f", 1),
        ("pictures/s", "pictures_per_s", ",.2f", 1),
        ("prefill, ms", "prefill_s", ",.1f", MS),
        ("step, ms", "step_s", ",.2f", MS),
        ("sampling, ms", "sampling_s", ",.2f", MS),
        ("decode, s", "decode_s", ",.2f", 1),
        ("CLIP, s", "clip_s", ",.2f", 1),
        ("cache, MB", "cache_bytes", ",.1f", MB),
    )
    print_columns(drawing, ("batch", "precision"), columns)
    print("\nHow near to the machine's limits")
    columns = (
        ("bare chain, ms", "bare_chain_s", ",.2f", MS),
        ("packed chain, ms", "packed_chain_s", ",.2f", MS),
        ("drawing, of the bare chain", "of_bare_chain", ".0%", 1),
        ("step, of the bare chain", "step_of_bare_chain", ".0%", 1),
        ("step, of the packed chain", "step_of_packed_chain", ".0%", 1),
        ("step, of the matmul rate", "matmul_rate_reached", ".0%", 1),
        ("step, of the bandwidth", "bandwidth_reached", ".0%", 1),
    )
    print_columns(drawing, ("batch", "precision"), columns)
    print(f"\n{REFERENCE} 1.6.6, and how many times as fast and as small ours is")
    if reference:
        names = [name.removeprefix("speed_up_") for name in reference[0] if name.startswith("speed_up_")]
        names = [name for name in names if not name.endswith("_rounds")]
        columns = (
            ("codes/s", "codes_per_s", ",.1f", 1),
            ("cache, MB", "cache_bytes", ",.1f", MB),
            *((f"{name}, faster", f"speed_up_{name}", ".1f", 1) for name in names),
            *((f"{name}, smaller", f"cache_less_by_{name}", ".1f", 1) for name in names),
        )
        print_columns(reference, ("way", "batch"), columns)
    else:
        print("It was not measured: --versus installs it, --reference names an interpreter that has it.")
    print("\nThe bundled model: what a precision draws as fp32 does")
    columns = (("codes, after fp32's", "same_codes", ".2%", 1), ("whole pictures", "same_pictures", ".0%", 1))
    print_columns(figures["agreement"], ("precision", "pictures"), columns)


def print_columns(lines: list[dict[str, Any]], keys: Sequence[str], columns: Sequence[Column]) -> None:
    """A table with the keys and then each column's figure, "-" where there is none."""
    rows = [
        [
            *(line[key] for key in keys),
            *(format(line[name] / unit, form) if name in line else "-" for _, name, form, unit in columns),
        ]
        for line in lines
    ]
    print_table([*keys, *(title for title, *_ in columns)], rows)
