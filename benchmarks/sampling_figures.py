"""The results of a sampling run: figures for each batch size and precision, and tables of them."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.drawing import Drawing, RenderTimes
from benchmarks.matmul_chain import step_bytes, step_flop
from benchmarks.reference import REFERENCE
from benchmarks.report import Column, print_figures
from benchmarks.timing import median_ratio
from dalle_lean import Dalle, DalleConfig

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
    Column("step, faster than plain", "faster_than_plain", ".2f"),
)
GUIDED_COLUMNS = (
    *KEYS,
    Column("codes/s", "codes_per_s", ",.0f"),
    Column("step, ms", "step_s", ",.2f", MS),
    Column("sampling, ms", "sampling_s", ",.2f", MS),
)
AGREEMENT_COLUMNS = (
    Column("precision", "precision"),
    Column("pictures", "pictures"),
    Column("codes, after fp32's", "same_codes", ".2%"),
    Column("whole pictures", "same_pictures", ".0%"),
)


Found = Mapping[tuple[int, str, Any], list[Any]]
"""The results of all rounds by batch size, measurement, and precision or way: "bare chain" and "packed chain" are
seconds of a step, "drawing" and "plain drawing" (in plain torch) are Drawing, "pictures" is RenderTimes, and REFERENCE,
if measured, the child's answers."""


def drawing_figures(model: Dalle, found: Found, limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """The figures for each batch size and precision."""
    num_codes = model.config.image_len
    num_steps = num_codes - 1
    figures = []
    for batch, precision in [(batch, precision) for batch, what, precision in found if what == "drawing"]:
        drawings: list[Drawing] = found[batch, "drawing", precision]
        renders: list[RenderTimes] = found[batch, "pictures", "fp32"]
        bare_s, packed_s = found[batch, "bare chain", "fp32"], found[batch, "packed chain", precision]
        step_s = [drawing.steps_s / num_steps for drawing in drawings]
        total_s = [drawing.total_s for drawing in drawings]
        plain_s = [drawing.steps_s / num_steps for drawing in found.get((batch, "plain drawing", precision), [])]
        flop_per_s = step_flop(model, batch) / median(step_s)
        bytes_per_s = step_bytes(model, precision, batch) / median(step_s)
        figures.append(
            {
                "batch": batch,
                "precision": precision,
                "codes_per_s": batch * num_codes / median(total_s),
                "pictures_per_s": batch / median(s + sum(render) for s, render in zip(total_s, renders, strict=True)),
                "prefill_s": median(drawing.prefill_s for drawing in drawings),
                "step_s": median(step_s),
                "sampling_s": median(drawing.sampling_s for drawing in drawings) / num_codes,
                "decode_s": median(render.decode_s for render in renders),
                "clip_s": median(render.score_s for render in renders),
                "cache_bytes": drawings[0].cache_bytes,
                "bare_chain_s": median(bare_s),
                "packed_chain_s": median(packed_s),
                "of_bare_chain": num_steps * median_ratio(bare_s, total_s),
                "step_of_bare_chain": median_ratio(bare_s, step_s),
                "step_of_packed_chain": median_ratio(packed_s, step_s),
                "matmul_rate_reached": flop_per_s / limits[f"matmul_{precision}_flop_per_s"],
                "bandwidth_reached": bytes_per_s / limits["bandwidth_bytes_per_s"],
                **({"faster_than_plain": median_ratio(plain_s, step_s)} if plain_s else {}),
            }
        )
    return figures


def guided_figures(num_codes: int, found: Mapping[tuple[int, str], list[Drawing]]) -> list[dict[str, Any]]:
    """The figures of drawing with guidance for each batch size and precision."""
    return [
        {
            "batch": batch,
            "precision": precision,
            "codes_per_s": batch * num_codes / median(drawing.total_s for drawing in drawings),
            "step_s": median(drawing.steps_s for drawing in drawings) / (num_codes - 1),
            "sampling_s": median(drawing.sampling_s for drawing in drawings) / num_codes,
        }
        for (batch, precision), drawings in found.items()
    ]


def reference_figures(config: DalleConfig, found: Found) -> list[dict[str, Any]]:
    """The figures for each way of the reference, and how much faster and smaller ours is in each precision."""
    figures = []
    for way in [way for _, what, way in found if what == REFERENCE]:
        answers = found[REFERENCE_BATCH, REFERENCE, way]
        their_s = [answer["seconds"] for answer in answers]
        line = {
            "way": way,
            "batch": REFERENCE_BATCH,
            "codes_per_s": REFERENCE_BATCH / median(their_s),
            "cache_bytes": answers[0]["cache_bytes"],
        }
        for precision in [name for batch, what, name in found if (batch, what) == (REFERENCE_BATCH, "drawing")]:
            drawings = found[REFERENCE_BATCH, "drawing", precision]
            our_s = [drawing.total_s / config.image_len for drawing in drawings]
            line[f"speed_up_{precision}"] = median_ratio(their_s, our_s)
            if line["cache_bytes"]:
                line[f"cache_less_by_{precision}"] = line["cache_bytes"] / drawings[0].cache_bytes
        figures.append(line)
    return figures


def report(figures: dict[str, Any]) -> None:
    """Print the tables."""
    drawing, reference = figures["drawing"], figures["reference"]
    print("\nDrawing: prefill, decoding and CLIP of the whole batch; a step and its sampling for one code per picture")
    print_figures(drawing, DRAWING_COLUMNS)
    print("\nShares of the machine's limits")
    print_figures(drawing, ROOFLINE_COLUMNS)
    print(f"\n{REFERENCE} 1.6.6, and how many times faster and smaller ours is")
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
        print("Not measured: --versus installs it, --reference names an interpreter that has it.")
    print("\nThe bundled model with guidance: a step and its sampling for one code per picture")
    print_figures(figures["guided"], GUIDED_COLUMNS)
    print("\nThe bundled model: shares drawn as in fp32")
    print_figures(figures["agreement"], AGREEMENT_COLUMNS)
