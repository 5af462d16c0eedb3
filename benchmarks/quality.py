"""How good are the pictures of a model? `python -m benchmarks.quality DATA SHARDS [--model FOLDER]`.

DATA is the folder that `make data` writes; SHARDS has train/ and heldout/ as `preprocess` wrote them. Captions and
grounds were held out: drawings of a set that training did not see, things on grounds and beside things never seen
together. The coloured shapes are captions of the training.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.report import print_json, print_table
from dalle_lean.clip import ClipScorer, right_caption_first
from inference import Generator
from inference.evaluation.codes import count_bits, model_bits
from inference.evaluation.pixels import COLOURS, ground_colour, thing_colour
from inference.evaluation.questions import read_lines
from inference.evaluation.shares import Share
from inference.generator import Settings
from preprocessing.emoji.captions import a
from preprocessing.emoji.names import with_article
from preprocessing.shards import open_stream, read_dataset_info

SHAPES = ("heart", "circle", "square", "book")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    best_of: int = 16
    grounds: int = 60
    captions: int = 100


def main() -> None:
    """Measure a model, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--model", type=Path, help="model folder (default: the bundled one)")
    parser.add_argument("--best-of", type=int, default=Sizes.best_of)
    parser.add_argument("--grounds", type=int, default=Sizes.grounds, help="prompts of a thing on a ground")
    parser.add_argument("--captions", type=int, default=Sizes.captions, help="held-out captions to rank")
    options = parser.parse_args()
    sizes = Sizes(best_of=options.best_of, grounds=options.grounds, captions=options.captions)

    generator = Generator.from_folder(options.model)
    heldout = read_lines(options.data / "heldout")
    figures: dict[str, Any] = {}
    rows = [*bits(generator, options.shards, figures)]
    rows += colours(generator, options.data, heldout, sizes, figures)
    rows += captions(generator, options.data, heldout, sizes, figures)
    print_table(("measure", "value"), rows)
    print_json("quality", {"model_sha256": generator.model_sha256, "best_of": sizes.best_of, **figures})


@torch.inference_mode()
def bits(generator: Generator, shards: Path, figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Held-out bits per image code: the model, and two count models that know nothing of the caption."""
    model, tokenizer = generator.model, generator.tokenizer
    rows = list(open_stream(shards / "heldout"))
    codes = torch.tensor(np.stack([row["codes"] for row in rows]), dtype=torch.long)
    text_ids = tokenizer.encode([row["caption"] for row in rows], model.config.text_len)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    figures["bits"] = model_bits(generator, text_ids, codes)
    figures["bits_of_a_strangers_caption"] = model_bits(generator, text_ids[order], codes)
    size = read_dataset_info(shards / "train").codebook_size
    train = np.stack([row["codes"] for row in open_stream(shards / "train")]).astype(np.int64)
    counts = np.stack([np.bincount(column, minlength=size) for column in train.T])
    figures["bits_counts"] = count_bits(np.tile(counts.sum(axis=0), (len(counts), 1)), codes.numpy())
    figures["bits_counts_by_place"] = count_bits(counts, codes.numpy())
    names = {
        "bits": "held-out bits per image code",
        "bits_of_a_strangers_caption": "the same under another picture's caption",
        "bits_counts": "count model, codes alone",
        "bits_counts_by_place": "count model, a table for each place",
    }
    return [(name, f"{figures[key]:.3f}") for key, name in names.items()]


def colours(
    generator: Generator, data: Path, heldout: list[dict[str, Any]], sizes: Sizes, figures: dict[str, Any]
) -> list[tuple[str, str]]:
    """Share of prompts whose best picture has the colour where it should be; the judge's own share on real drawings."""
    out = []
    prompts = [(with_article(f"{colour} {shape}"), colour) for shape in SHAPES for colour in COLOURS]
    known = {line["text"] for line in read_lines(data / "train") if line["kind"] == "plain"}
    prompts = [(prompt, colour) for prompt, colour in prompts if prompt in known]
    hits = sum(thing_colour(best(generator, prompt, sizes)) == colour for prompt, colour in prompts)
    figures["shape_colour_right"] = hits / len(prompts)
    out.append((f"colour right, a COLOUR {'/'.join(SHAPES)}, best of {sizes.best_of}", Share(hits, len(prompts))))
    expected = dict(prompts)
    real = [
        (data / "train" / line["file_name"], expected[line["text"]])
        for line in read_lines(data / "train")
        if line["kind"] == "plain" and line["text"] in expected
    ]
    hits = sum(thing_colour(Image.open(path)) == colour for path, colour in real)
    figures["shape_colour_right_on_drawings"] = hits / len(real)
    out.append(("the same judge on the real drawings", Share(hits, len(real))))

    scenes = [line for line in heldout if line["held_out"] == "ground" and line["kind"] == "scene"]
    chosen = random.Random(0).sample(scenes, min(sizes.grounds, len(scenes)))
    hits = sum(ground_colour(best(generator, ground_prompt(line), sizes)) == line["ground"] for line in chosen)
    figures["ground_colour_right"] = hits / len(chosen)
    out.append(
        (
            f"ground right, a THING on a COLOUR ground never seen together, best of {sizes.best_of}",
            Share(hits, len(chosen)),
        )
    )
    hits = sum(ground_colour(Image.open(data / "heldout" / line["file_name"])) == line["ground"] for line in scenes)
    figures["ground_colour_right_on_drawings"] = hits / len(scenes)
    out.append(("the same judge on the real drawings", Share(hits, len(scenes))))
    return out


def ground_prompt(line: dict[str, Any]) -> str:
    """ "a THING on a COLOUR ground" for a held-out scene."""
    return f"{a(line['things'][0])} on {with_article(line['ground'])} ground"


def best(generator: Generator, prompt: str, sizes: Sizes) -> Image.Image:
    """The picture that CLIP likes best."""
    return generator.run(prompt, Settings(num_images=sizes.best_of, best=1))[0].image


def captions(
    generator: Generator, data: Path, heldout: list[dict[str, Any]], sizes: Sizes, figures: dict[str, Any]
) -> list[tuple[str, str]]:
    """Share of pictures for which CLIP puts the right one of 50 held-out captions first."""
    clip = generator.scorer
    if not isinstance(clip, ClipScorer):
        return [("right caption first of 50", "the model has no CLIP")]
    lines = [line for line in heldout if line["held_out"] in ("drawing", "ground", "thing pair")]
    lines = list({line["text"]: line for line in lines}.values())
    lines = random.Random(1).sample(lines, min(sizes.captions, len(lines)))
    texts = [line["text"] for line in lines]
    text_features = clip.text_features(texts)
    firsts, bests = [], []
    for text in texts:
        drawn = generator.run(text, Settings(num_images=sizes.best_of, best=sizes.best_of))
        bests.append(drawn[0].image)
        firsts.append(next(picture.image for picture in drawn if picture.index == 0))
    real = [Image.open(data / "heldout" / line["file_name"]).convert("RGB") for line in lines]
    out = []
    for key, name, pictures in (
        ("caption_first_best", f"right caption first of 50, best of {sizes.best_of}", bests),
        ("caption_first_one", "right caption first of 50, one picture", firsts),
        ("caption_first_on_drawings", "right caption first of 50, the real drawings", real),
    ):
        figures[key] = right_caption_first(clip.image_features(pictures), text_features, texts)
        out.append((name, Share(round(figures[key] * len(texts)), len(texts))))
    return out


if __name__ == "__main__":
    main()
