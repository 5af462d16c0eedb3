"""How fast are a user's three jobs on this machine? `python -m benchmarks.speed [DATA]`.

DATA is a folder of pictures with captions (default: the drawings of the tests, in a checkout). All three use the
bundled model.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.reference import random_batch
from benchmarks.report import TEST_PICTURES, make_parser, print_json, print_table
from benchmarks.timing import now, seconds_of
from dalle_lean import Dalle
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.model_folder import bundled_model
from inference import Generator
from inference.request import Settings
from preprocessing.encoding.encode import preprocess
from preprocessing.sources import open_source
from training.data.loader import Batch
from training.run.recipe import load_recipe
from training.step.learner import Learner

TRAIN_STEPS = 8
PICTURES = 64
ASKED = ((1, 1), (16, 4))
"""(pictures drawn, the best shown) for which seconds are measured."""


def main() -> None:
    """Measure the three rates, print the table and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=TEST_PICTURES if TEST_PICTURES.is_dir() else None)
    data: Path | None = parser.parse_args().data
    generator = Generator.from_folder(bundled_model())
    rates = {} if data is None else {"preprocess_pictures_per_s": preprocess_rate(data, generator.device)}
    rates |= {
        "train_samples_per_s": train_rate(generator.model),
        "generate_pictures_per_s": PICTURES / drawing_s(generator, PICTURES, 4),
    }
    rates |= {f"best_{best}_of_{drawn}_s": drawing_s(generator, drawn, best) for drawn, best in ASKED}
    if data is None:
        print("Preprocessing was not measured: DATA must name a folder of pictures with captions.")
    print_table(("rate", "value"), [(name, f"{rate:.1f}") for name, rate in rates.items()])
    print_json("speed", rates)


def preprocess_rate(data: Path, device: torch.device) -> float:
    """Pictures read, filtered, encoded and written per second."""
    vqgan = VQGAN.load(bundled_model() / "vqgan").to(device)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        info = preprocess(open_source(data, 4096), Path(folder) / "shards", vqgan)
        assert info is not None, "all parts were preprocessed here"
        return info.counts.seen / (time.perf_counter() - started)


def train_rate(model: Dalle) -> float:
    """Samples per second of optimizer steps with the bundled model's recipe."""
    recipe, device = load_recipe("emoji128"), model.output.weight.device
    torch.manual_seed(0)
    learner = Learner(Dalle(model.config).to(device), recipe)
    batch = Batch(**random_batch(model.config, recipe.data.batch_size))
    learner.step(batch, lr=1e-4)
    return recipe.data.batch_size / seconds_of(lambda: learner.step(batch, lr=1e-4), TRAIN_STEPS, device)


def drawing_s(generator: Generator, num_images: int, best: int) -> float:
    """Seconds to draw, decode and rank a prompt's pictures with the model's guidance, after a warm-up; on CUDA with as
    many pictures, for which graphs are recorded."""
    settings = Settings(num_images=num_images, best=best, guidance=generator.guidance)
    warm_up = num_images if generator.device.type == "cuda" else 4
    generator.run("a red heart", replace(settings, num_images=warm_up, best=min(best, warm_up)))
    started = now(generator.device)
    generator.run("a red heart", settings)
    return now(generator.device) - started


if __name__ == "__main__":
    main()
