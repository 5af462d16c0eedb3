"""What a sampling run found: figures of each batch size and precision, and tables of them."""

from statistics import median
from typing import Any, NamedTuple

from benchmarks.drawing import Drawing, RenderTimes
from benchmarks.matmul_chain import step_bytes, step_flop
from benchmarks.reference import REFERENCE
from benchmarks.report import Column, print_figures
from dalle_lean import Dalle, DalleConfig
from inference.sampling.packed_linear import Precision

REFERENCE_BATCH = 8
WAYS = ("shipped", "mended")
MS, MB = 1e-3, 1e6
KEYS = (Column("batch", "batch"), Column("precision", "precision"))
DRAWING_COLUMNS = (
    *KEYS,
    Column("codes/s", "codes_per_s", ",.0f"),
    Column("pictures/s", "pictures_per_s", ",.2f"),
    Column("prefill, ms", "prefill_s", ",.1f", MS),
    Column("step, ms", "step_s", ",.2f", MS),
    Column("sampling, ms", "sampling_s", ",.2f", MS),
    Column("decode, s", "decode_s", ",.2f"),
    Column("CLIP, s", "clip_s", ",.2f"),
    Column("cache, MB", "cache_bytes", ",.1f", MB),
)
ROOFLINE_COLUMNS = (
    *KEYS,
    Column("bare chain, ms", "bare_chain_s", ",.2f", MS),
    Column("packed chain, ms", "packed_chain_s", ",.2f", MS),
    Column("drawing, of the bare chain", "of_bare_chain", ".0%"),
    Column("step, of the bare chain", "step_of_bare_chain", ".0%"),
    Column("step, of the packed chain", "step_of_packed_chain", ".0%"),
    Column("step, of the matmul rate", "matmul_rate_reached", ".0%"),
    Column("step, of the bandwidth", "bandwidth_reached", ".0%"),
)
AGREEMENT_COLUMNS = (
    Column("precision", "precision"),
    Column("pictures", "pictures"),
    Column("codes, after fp32's", "same_codes", ".2%"),
    Column("whole pictures", "same_pictures", ".0%"),
)


class Measurements(NamedTuple):
    """Of one batch size; each list has a value for every round."""

    bare_s: list[float]
    """A step of the bare chain."""
    packed_s: dict[Precision, list[float]]
    """A step of each packed one."""
    drawings: dict[Precision, list[Drawing]]
    render_times: list[RenderTimes]
    reference: dict[str, list[dict[str, Any]]]
    """What each way of the reference answered; empty at other batch sizes and where there is none."""


def drawing_figures(model: Dalle, found: dict[int, Measurements], limits: dict[str, float]) -> list[dict[str, Any]]:
    """The figures of each batch size and precision."""
    num_codes = model.config.image_len
    num_steps = num_codes - 1
    figures = []
    for batch, measured in found.items():
        render_times = measured.render_times
        for precision, drawings in measured.drawings.items():
            step_s = [drawing.steps_s / num_steps for drawing in drawings]
            picture_s = [drawing.total_s + sum(times) for drawing, times in zip(drawings, render_times, strict=True)]
            flop_per_s = step_flop(model, batch) / median(step_s)
            bytes_per_s = step_bytes(model, precision, batch) / median(step_s)
            figures.append(
                {
                    "batch": batch,
                    "precision": precision,
                    "codes_per_s": batch * num_codes / median(drawing.total_s for drawing in drawings),
                    "pictures_per_s": batch / median(picture_s),
                    "prefill_s": median(drawing.prefill_s for drawing in drawings),
                    "step_s": median(step_s),
                    "sampling_s": median(drawing.sampling_s for drawing in drawings) / num_codes,
                    "decode_s": median(times.decode_s for times in render_times),
                    "clip_s": median(times.score_s for times in render_times),
                    "cache_bytes": drawings[0].cache_bytes,
                    "bare_chain_s": median(measured.bare_s),
                    "packed_chain_s": median(measured.packed_s[precision]),
                    "of_bare_chain": num_steps * median_ratio(measured.bare_s, [each.total_s for each in drawings]),
                    "step_of_bare_chain": median_ratio(measured.bare_s, step_s),
                    "step_of_packed_chain": median_ratio(measured.packed_s[precision], step_s),
                    "matmul_rate_reached": flop_per_s / limits[f"matmul_{precision}_flop_per_s"],
                    "bandwidth_reached": bytes_per_s / limits["bandwidth_bytes_per_s"],
                }
            )
    return figures


def reference_figures(config: DalleConfig, measured: Measurements) -> list[dict[str, Any]]:
    """The figures of each way of the reference, and how many times as fast and as small ours is in each precision."""
    figures = []
    for way, answers in measured.reference.items():
        their_s = [answer["seconds"] for answer in answers]
        line = {
            "way": way,
            "batch": REFERENCE_BATCH,
            "codes_per_s": REFERENCE_BATCH / median(their_s),
            "cache_bytes": answers[0]["cache_bytes"],
        }
        for precision, drawings in measured.drawings.items():
            our_s = [drawing.total_s / config.image_len for drawing in drawings]
            line[f"speed_up_{precision}"] = median_ratio(their_s, our_s)
            if line["cache_bytes"]:
                line[f"cache_less_by_{precision}"] = line["cache_bytes"] / drawings[0].cache_bytes
        figures.append(line)
    return figures


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios within each round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def report(figures: dict[str, Any]) -> None:
    """The tables."""
    drawing, reference = figures["drawing"], figures["reference"]
    print(
        "\nDrawing; prefill, decoding and CLIP for all pictures at once, a step and its sampling for one code of each"
    )
    print_figures(drawing, DRAWING_COLUMNS)
    print("\nHow near to the machine's limits")
    print_figures(drawing, ROOFLINE_COLUMNS)
    print(f"\n{REFERENCE} 1.6.6, and how many times as fast and as small ours is")
    if reference:
        precisions = list(dict.fromkeys(line["precision"] for line in drawing))
        columns = [
            Column("way", "way"),
            Column("batch", "batch"),
            Column("codes/s", "codes_per_s", ",.1f"),
            Column("cache, MB", "cache_bytes", ",.1f", MB),
            *(Column(f"{precision}, faster", f"speed_up_{precision}", ".1f") for precision in precisions),
            *(Column(f"{precision}, smaller", f"cache_less_by_{precision}", ".1f") for precision in precisions),
        ]
        print_figures(reference, columns)
    else:
        print("It was not measured: --versus installs it, --reference names an interpreter that has it.")
    print("\nThe bundled model: what a precision draws as fp32 does")
    print_figures(figures["agreement"], AGREEMENT_COLUMNS)
