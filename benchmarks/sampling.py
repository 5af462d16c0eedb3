"""How fast are pictures drawn? `python -m benchmarks.sampling [--versus]`, `... --paper --device cuda`.

Codes and pictures per second of this package's sampler in each precision, with the seconds of each phase, the bytes of
the cache, and how near the machine's limits that is:

- bare chain: a step's products with weights alone, torch's F.linear in fp32. "packed chain" is the same with the
  weights as inference/sampling/packed_linear.py packs them in each precision. Drawing reaches the share chain /
  (prefill + steps + sampling), a step the share chain / step.
- matmul rate: operations of the weights' products over what one large product reaches in the same precision and run.
- bandwidth: bytes that a step must read (weights once, keys and values seen) over the rate of reading 0.5 GB.

The model has random weights: hidden 256, 16 layers, 4 heads of 64, text 64, 16 x 16 codes of 1024. Codes/s are those of
whole pictures of one prompt, prefill and sampling included; pictures/s also hold decoding and ranking by the bundled
model's VQGAN and CLIP, in batches of 8 (here pictures of 128 pixels). `--paper` takes the paper's model and a random
VQGAN of its size (256 pixels) instead.

--versus installs dalle-pytorch 1.6.6 into an environment of its own, --reference PYTHON names an interpreter that has
it. It has the same weights, in a process of its own, at batch 8, and draws a few codes in the middle of the picture
with its cache as shipped and mended (benchmarks/worker_sampling_dalle_pytorch.py); logits must agree before anything
is timed. Its codes/s do not hold its prefill.

Everything takes turns: in each round every batch size with all its subjects once. A figure is the median over the
rounds, a ratio the median of the ratios within each.

Agreement is that of the bundled model: which share of codes a lower precision draws as fp32 does, given fp32's codes
so far and the same noise, and which share of whole pictures is the same when each goes on from its own codes.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.child_process import Child
from benchmarks.drawing import Drawing, choices_after, draw, paint
from benchmarks.matmul_chain import bare_chain, packed_chain
from benchmarks.reference import REFERENCE, add_reference_options, find_reference
from benchmarks.report import print_json
from benchmarks.roofline import bandwidth, matmul_rate, seconds_of
from benchmarks.sampling_figures import REFERENCE_BATCH, WAYS, Turn, judge_drawing, judge_reference, report
from benchmarks.training import SMALL, random_batch, their_task, weights_of
from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import from_dalle_pytorch
from dalle_lean.devices import pick_device
from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model
from dalle_lean.terminal import progress_bar
from inference import Generator
from inference.sampling.decoder import Decoder
from inference.sampling.packed_linear import Precision
from inference.sampling.sampler import Sampling
from inference.scorer import Scorer

BATCHES = (1, 8, 32, 128)
ROUNDS = 3
PROMPT = "a red heart"
AGREEMENT_PROMPTS = (PROMPT, "a blue circle", "a cat", "a green book")
AGREEMENT_PICTURES = 32
"""Of each prompt."""
CHAIN_STEPS = 64
LOGITS_AGREEMENT = 1e-3
"""Largest difference of logits in fp32; they vary by about one."""

OnStep = Callable[[str], None]


class Subject(NamedTuple):
    """A model in each of its precisions, and what makes pictures of its codes."""

    decoders: dict[Precision, Decoder]
    vqgan: VQGAN
    scorer: Scorer

    @property
    def model(self) -> Dalle:
        """The one that all decoders were made of."""
        return self.decoders["fp32"].model


def main() -> None:
    """Measure, print the tables and the JSON line."""
    options = parse()
    parser: argparse.ArgumentParser = options.parser
    torch.set_num_threads(options.threads)
    load_average = os.getloadavg()[0]
    try:
        device, reference = pick_device(options.device), find_reference(options)
        if reference is not None and (options.paper or device.type != "cpu"):
            raise UserError("the reference is measured with the default model on the CPU; leave --paper and --device")
        limits = measure_limits(device)
        with progress_bar("Sampling", "parts") as on_progress, ExitStack() as stack:
            subject = make_subject(SMALL if not options.paper else DalleConfig.paper(), device)
            child, differences = (
                start_reference(reference, subject.model, options.threads, stack) if reference else (None, None)
            )
            done, total = 0, num_parts(options.batches, options.rounds, subject, child)

            def on_step(note: str) -> None:
                nonlocal done
                done += 1
                on_progress(done, total, note)

            turns = [
                take_turn(subject, batch, child if batch == REFERENCE_BATCH else None, on_step)
                for _ in range(options.rounds)
                for batch in options.batches
            ]
            agreement = measure_agreement(device, on_step)
    except ValueError as mistake:
        parser.error(str(mistake))
    again = measure_limits(device)
    limits = {name: max(limits[name], again[name]) for name in limits}
    figures: dict[str, Any] = {
        "drawing": judge_drawing(subject.model, turns, limits),
        "reference": judge_reference(subject.model.config, turns),
        "agreement": agreement,
    }
    if not options.json:
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


def parse() -> argparse.Namespace:
    """The options, and the parser to complain with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_reference_options(parser)
    parser.add_argument("--paper", action="store_true", help="the paper's model, 128 pictures")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="pictures at once (default: 1 8 32 128)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all subjects in turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=num_cores(), help="of each process (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    options.batches = options.batches or (BATCHES[-1:] if options.paper else BATCHES)
    for name, smallest in (("rounds", options.rounds), ("threads", options.threads), ("batches", min(options.batches))):
        if smallest < 1:
            parser.error(f"--{name} {smallest}: must be at least 1")
    options.parser = parser
    return options


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Those that sampling has on a device."""
    return ("fp32", "bf16", "int8") if device.type == "cpu" else ("fp32", "bf16", "fp16")


def measure_limits(device: torch.device) -> dict[str, float]:
    """What the machine does at most, in operations and bytes per second."""
    rates = {f"matmul_{precision}_flop_per_s": matmul_rate(precision, device) for precision in precisions(device)}
    return {**rates, "bandwidth_bytes_per_s": bandwidth(device)}


def make_subject(config: DalleConfig, device: torch.device) -> Subject:
    """A model of random weights; it paints with the bundled VQGAN where that has its codes, else with a random one."""
    bundled = Generator.from_folder(bundled_model(), device=device)
    model = from_dalle_pytorch(weights_of(config), config).eval().to(device)
    fits = bundled.vqgan.config.codebook_size == config.image_vocab_size
    vqgan = bundled.vqgan if fits else VQGAN(VQGANConfig(codebook_size=config.image_vocab_size)).eval().to(device)
    assert bundled.scorer is not None, "the bundled model has a CLIP"
    return Subject({name: Decoder(model, name) for name in precisions(device)}, vqgan, bundled.scorer)


def num_parts(batches: Sequence[int], rounds: int, subject: Subject, child: Child | None) -> int:
    """How often `on_step` is called."""
    each = 2 + 2 * len(subject.decoders)
    theirs = len(WAYS) * (child is not None) * list(batches).count(REFERENCE_BATCH)
    return rounds * (len(batches) * each + theirs) + len(subject.decoders)


def start_reference(
    python: str, model: Dalle, threads: int, stack: ExitStack, num_codes: int = 16
) -> tuple[Child, dict[str, float]]:
    """A child that draws `num_codes` in the middle of the picture; and how far its logits are from ours.

    ValueError where that is too far: then it does not compute the same function.
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
        **their_task(config),
        "threads": threads,
        "weights": str(folder / "weights"),
        "batch": str(folder / "batch"),
        "first": first,
        "num_codes": num_codes,
        "top_k": Sampling().top_k,
    }
    child = stack.enter_context(Child(python, "benchmarks.worker_sampling_dalle_pytorch", task))
    differences = child.answer()
    for way, difference in differences.items():
        if not difference <= LOGITS_AGREEMENT:
            raise UserError(f"logits of {REFERENCE}, {way}, are {difference} from ours: it is another function")
    return child, differences


def take_turn(subject: Subject, batch: int, child: Child | None, on_step: OnStep) -> Turn:
    """Everything once at one batch size."""
    config, device = subject.model.config, subject.decoders["fp32"].device
    text_ids = random_batch(config, 1)["text_ids"]

    def chain_s(chain: Callable[[], None]) -> float:
        chain()
        return seconds_of(chain, CHAIN_STEPS, device)

    on_step(f"batch {batch}, bare chain")
    bare_s = chain_s(bare_chain(subject.model, batch))
    packed_s: dict[Precision, float] = {}
    drawings: dict[Precision, Drawing] = {}
    for precision, decoder in subject.decoders.items():
        on_step(f"batch {batch}, {precision}, packed chain")
        packed_s[precision] = chain_s(packed_chain(decoder, batch))
        on_step(f"batch {batch}, {precision}")
        drawings[precision] = draw(decoder, text_ids, batch)
    on_step(f"batch {batch}, pictures")
    painting = paint(drawings["fp32"].codes, PROMPT, subject.vqgan, subject.scorer)
    reference = {}
    for way in WAYS if child is not None else ():
        on_step(f"batch {batch}, {REFERENCE}, {way}")
        assert child is not None
        reference[way] = child.ask(way)
    return Turn(batch, bare_s, packed_s, drawings, painting, reference)


def measure_agreement(device: torch.device, on_step: OnStep) -> list[dict[str, Any]]:
    """Of the bundled model, for each precision: shares of codes and of pictures that are fp32's."""
    bundled = Generator.from_folder(bundled_model(), device=device, scorer="none")
    text_ids = bundled.tokenizer.encode(list(AGREEMENT_PROMPTS), bundled.model.config.text_len)
    expected: Tensor | None = None
    figures = []
    for precision in precisions(device):
        on_step(f"agreement, {precision}")
        decoder = Decoder(bundled.model, precision)
        codes = draw(decoder, text_ids, AGREEMENT_PICTURES).codes
        expected = codes if expected is None else expected
        chosen = choices_after(decoder, text_ids, expected)
        figures.append(
            {
                "precision": precision,
                "same_codes": (chosen == expected).double().mean().item(),
                "same_pictures": (codes == expected).all(dim=1).double().mean().item(),
                "pictures": len(codes),
            }
        )
    return figures


if __name__ == "__main__":
    main()
