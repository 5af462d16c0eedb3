"""How fast are pictures drawn? `python -m benchmarks.sampling [--versus]`, `... --paper --device cuda`.

Codes and pictures per second of this package's sampler in each precision, with the seconds of each phase, the bytes of
the cache, and the shares that it reaches of the machine's limits:

- bare chain: a step's products with weights alone, by torch's F.linear in fp32. "packed chain" is the same with the
  weights packed for oneDNN in each precision. Drawing reaches the share chain / (prefill + steps + sampling), a step
  the share chain / step.
- matmul rate: the operations per second of a step's products with weights over those of one large product in the same
  precision and run.
- bandwidth: the bytes per second that a step must read (weights once, keys and values seen) over the rate of reading
  0.5 GB.

The model has random weights: hidden 256, 16 layers, 4 heads of 64, text 64, 16 x 16 codes of 1024. Codes/s are for
whole pictures of one prompt, including prefill and sampling; pictures/s also include decoding and ranking by a VQGAN
of the bundled model's size and its CLIP in batches of 8 (here pictures of 128 pixels). `--paper` uses the paper's model
and a VQGAN of the published size (256 pixels) instead. "than plain" is how many times faster a step is than the same in
plain torch.

--versus installs dalle-pytorch 1.6.6 into an environment of its own, --reference PYTHON names an interpreter that has
it. With the same weights, in a process of its own, at batch 8, it draws a few codes in the middle of the picture, with
its cache as shipped and as mended (benchmarks/worker_sampling_dalle_pytorch.py). Logits must agree before anything is
timed. Its codes/s exclude its prefill.

All measurements take turns: each round runs each of them once. A figure is the median over the rounds, a ratio the
median of the ratios within each round.

The bundled model is drawn with its own guidance, as the page does: a step then reads two rows for each picture, and
few codes are left to sample from.

Agreement is measured on the bundled model, without guidance: the share of codes that a precision draws as fp32 does,
given fp32's codes so far and the same noise; and the share of whole pictures that are the same when each continues with
its own codes.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.child_process import Child
from benchmarks.drawing import choices_after, draw, render
from benchmarks.matmul_chain import Chain, bare_chain, packed_chain
from benchmarks.reference import (
    REFERENCE,
    SMALL,
    add_reference_options,
    find_reference,
    random_batch,
    reference_task,
    weights_of,
)
from benchmarks.report import check_positive, make_parser, print_json
from benchmarks.roofline import bandwidth, matmul_rate
from benchmarks.sampling_figures import (
    REFERENCE_BATCH,
    WAYS,
    Found,
    drawing_figures,
    guided_figures,
    reference_figures,
    report,
)
from benchmarks.timing import in_turns, seconds_of
from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import from_dalle_pytorch
from dalle_lean.devices import pick_device
from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model
from inference import Generator
from inference.request import Settings
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.packed_linear import Precision
from inference.scorer import Scorer

BATCHES = (1, 8, 32, 128)
PROMPT = "a red heart"
AGREEMENT_PROMPTS = (PROMPT, "a blue circle", "a cat", "a green book")
AGREEMENT_PICTURES = 32
"""For each prompt."""
CHAIN_STEPS = 64
LOGITS_AGREEMENT = 1e-3
"""Largest allowed difference of logits in fp32, which vary by about one."""


class Pipeline(NamedTuple):
    """A model in each of its precisions, and what turns its codes into ranked pictures."""

    decoders: dict[Precision, PackedDecoder]
    vqgan: VQGAN
    scorer: Scorer

    @property
    def model(self) -> Dalle:
        """The model of all decoders."""
        return self.decoders["fp32"].model


def main() -> None:
    """Measure, print the tables and the JSON line."""
    parser = make_parser(__doc__)
    options = parse(parser)
    torch.set_num_threads(options.threads)
    load_average = os.getloadavg()[0]
    child, differences = None, None
    try:
        device, reference = pick_device(options.device), find_reference(options)
        if reference is not None and (options.paper or device.type != "cpu"):
            raise UserError("the reference runs the default model on the CPU; leave out --paper and --device")
        limits = measure_limits(device)
        pipeline = make_pipeline(DalleConfig.paper() if options.paper else SMALL, device)
        with ExitStack() as stack:
            if reference is not None:
                child, differences = start_reference(reference, pipeline.model, options.threads, stack)
            found = measure(pipeline, options.batches, options.rounds, child)
        bundled = Generator.from_folder(bundled_model(), device=device, scorer="none")
        guided = measure_guided(bundled, options.batches, options.rounds)
        agreement = measure_agreement(bundled)
    except UserError as mistake:
        parser.error(str(mistake))
    again = measure_limits(device)
    limits = {name: max(limits[name], again[name]) for name in limits}
    figures: dict[str, Any] = {
        "drawing": drawing_figures(pipeline.model, found, limits),
        "reference": reference_figures(pipeline.model.config, found),
        "guided": guided,
        "agreement": agreement,
    }
    report(figures)
    settings = {
        "device": str(device),
        "threads": options.threads,
        "load_average": load_average,
        "rounds": options.rounds,
        "model": "paper" if options.paper else "small",
        "limits": limits,
        "logits_difference": differences,
    }
    print_json("sampling_paper" if options.paper else "sampling", {**settings, **figures})


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add_reference_options(parser)
    parser.add_argument("--paper", action="store_true", help="the paper's model, 128 pictures")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="batch sizes (default: 1 8 32 128)")
    parser.add_argument("--rounds", type=int, default=3, help="of all measurements (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores, help="of each process (default: all cores)")
    options = parser.parse_args()
    options.batches = options.batches or (BATCHES[-1:] if options.paper else BATCHES)
    check_positive(parser, rounds=options.rounds, threads=options.threads, batches=min(options.batches))
    return options


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """The precisions of sampling on a device."""
    return ("fp32", "bf16", "int8") if device.type == "cpu" else ("fp32", "bf16", "fp16")


def measure_limits(device: torch.device) -> dict[str, float]:
    """The machine's limits in operations and bytes per second."""
    rates = {f"matmul_{precision}_flop_per_s": matmul_rate(precision, device) for precision in precisions(device)}
    return {**rates, "bandwidth_bytes_per_s": bandwidth(device)}


def make_pipeline(config: DalleConfig, device: torch.device) -> Pipeline:
    """A model with random weights; a VQGAN of the bundled one's size, or of the published size for pictures of 256."""
    bundled = Generator.from_folder(bundled_model(), device=device)
    model = from_dalle_pytorch(weights_of(config), config).eval().to(device)
    size = bundled.vqgan.config
    if size.downscale * config.image_side != size.picture_side:
        size = VQGANConfig()
    vqgan = VQGAN(replace(size, codebook_size=config.image_vocab_size)).eval().to(device)
    assert bundled.scorer is not None, "the bundled model has a CLIP"
    return Pipeline({name: PackedDecoder(model, name) for name in precisions(device)}, vqgan, bundled.scorer)


def start_reference(
    python: str, model: Dalle, threads: int, stack: ExitStack, num_codes: int = 16
) -> tuple[Child, dict[str, float]]:
    """A child that draws `num_codes` in the middle of the picture, and the largest differences of its logits from ours.

    UserError if they are too large: it then computes another function.
    """
    config = model.config
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    batch = random_batch(config, REFERENCE_BATCH)
    first = (config.image_len - num_codes) // 2
    with torch.inference_mode():
        logits = model(batch["text_ids"], batch["image_codes"][:, :first])[:, -1, config.num_text_tokens :]
    save_file(weights_of(config), folder / "weights")
    save_file({**batch, "logits": logits.contiguous()}, folder / "batch")
    task = {
        **reference_task(config),
        "threads": threads,
        "weights": str(folder / "weights"),
        "batch": str(folder / "batch"),
        "first": first,
        "num_codes": num_codes,
        "top_k": Settings().top_k,
    }
    child = stack.enter_context(Child(python, "benchmarks.worker_sampling_dalle_pytorch", task))
    differences = child.answer()
    for way, difference in differences.items():
        if not difference <= LOGITS_AGREEMENT:
            raise UserError(f"logits of {REFERENCE}, {way}, differ from ours by {difference}: it is another function")
    return child, differences


def measure(pipeline: Pipeline, batches: tuple[int, ...], rounds: int, child: Child | None) -> Found:
    """Run all measurements in turns."""
    model, device = pipeline.model, pipeline.decoders["fp32"].device
    text_ids = random_batch(model.config, 1)["text_ids"]
    plain: dict[Precision, PackedDecoder] = {
        name: PackedDecoder(model, name, compiled=False) for name in pipeline.decoders
    }

    def chain_s(make_chain: Callable[..., Chain], *arguments: Any) -> float:
        chain = make_chain(*arguments)
        chain()
        return seconds_of(chain, CHAIN_STEPS, device)

    measures: dict[tuple[int, str, str], Callable[[], Any]] = {}
    for batch in batches:
        codes = random_batch(model.config, batch)["image_codes"].to(device)
        measures[batch, "bare chain", "fp32"] = partial(chain_s, bare_chain, model, batch)
        for precision, decoder in pipeline.decoders.items():
            measures[batch, "packed chain", precision] = partial(chain_s, packed_chain, plain[precision], batch)
            measures[batch, "drawing", precision] = partial(draw, decoder, text_ids, batch)
        measures[batch, "plain drawing", "fp32"] = partial(draw, plain["fp32"], text_ids, batch)
        measures[batch, "pictures", "fp32"] = partial(render, codes, PROMPT, pipeline.vqgan, pipeline.scorer)
        for way in WAYS if child is not None and batch == REFERENCE_BATCH else ():
            assert child is not None
            measures[batch, REFERENCE, way] = partial(child.ask, way)
    return in_turns(measures, rounds, "Sampling")


def measure_guided(bundled: Generator, batches: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """The bundled model's drawing of one prompt with guidance, in each precision."""
    text_ids = bundled.tokenizer.encode([PROMPT], bundled.model.config.text_len)
    measures = {
        (batch, name): partial(draw, PackedDecoder(bundled.model, name), text_ids, batch, bundled.guidance)
        for batch in batches
        for name in precisions(bundled.device)
    }
    return guided_figures(bundled.model.config.image_len, in_turns(measures, rounds, "Guidance"))


def measure_agreement(bundled: Generator) -> list[dict[str, Any]]:
    """For each precision of the bundled model: the shares of codes and of pictures that equal fp32's."""
    text_ids = bundled.tokenizer.encode(list(AGREEMENT_PROMPTS), bundled.model.config.text_len)
    names = precisions(bundled.device)
    decoders: dict[Precision, PackedDecoder] = {name: PackedDecoder(bundled.model, name) for name in names}
    expected = draw(decoders["fp32"], text_ids, AGREEMENT_PICTURES).codes

    def agreement(precision: Precision) -> dict[str, Any]:
        again = precision != "fp32"
        codes = draw(decoders[precision], text_ids, AGREEMENT_PICTURES).codes if again else expected
        chosen = choices_after(decoders[precision], text_ids, expected)
        return {
            "precision": precision,
            "same_codes": (chosen == expected).double().mean().item(),
            "same_pictures": (codes == expected).all(dim=1).double().mean().item(),
            "pictures": len(codes),
        }

    found = in_turns({name: partial(agreement, name) for name in decoders}, 1, "Agreement")
    return [figures for [figures] in found.values()]


if __name__ == "__main__":
    main()
