"""One picture for each of sixteen fixed prompts: `python -m benchmarks.pictures OUT.png [--model FOLDER]`."""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dalle_lean.lettering import wrapped
from inference import Generator
from inference.gallery import enlarged, write_png
from inference.generator import Settings

PROMPTS = (
    "a red heart",
    "a blue book",
    "a green circle on a pink ground",
    "a big yellow square on a purple ground",
    "a dog face",
    "a slice of pizza on a blue ground",
    "a small cat on an orange ground",
    "an apple",
    "a tree on a yellow ground",
    "a rocket on a black ground",
    "a smiling face",
    "a red car on the left on a green ground",
    "a house",
    "a purple heart on a yellow ground",
    "a fish on a red ground",
    "a banana and a red circle on a white ground",
)
SIDE = 192
MARGIN = 16
COLUMNS = 4
CAPTION_HEIGHT = 44


def main() -> None:
    """Draw the best of 16 with seed 0 for every prompt and write them as one sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="model folder (default: the bundled one)")
    options = parser.parse_args()
    generator = Generator.from_folder(options.model)
    settings = Settings(num_images=16, best=1, seed=0)
    pictures = [generator.run(prompt, settings)[0].image for prompt in PROMPTS]
    write_png(options.out, sheet(pictures), {})


def sheet(pictures: list[Image.Image]) -> Image.Image:
    """The pictures in rows of four, each prompt below its picture."""
    cell_width, cell_height = SIDE + MARGIN, SIDE + CAPTION_HEIGHT
    rows = -(-len(pictures) // COLUMNS)
    out = Image.new("RGB", (MARGIN + COLUMNS * cell_width, MARGIN + rows * cell_height), "white")
    draw, font = ImageDraw.Draw(out), ImageFont.load_default(14)
    for place, (prompt, picture) in enumerate(zip(PROMPTS, pictures, strict=True)):
        left = MARGIN + (place % COLUMNS) * cell_width
        top = MARGIN + (place // COLUMNS) * cell_height
        out.paste(enlarged(picture, SIDE), (left, top))
        for line, text in enumerate(wrapped(prompt, font, SIDE)[:2]):
            draw.text((left, top + SIDE + 3 + 17 * line), text, fill="black", font=font)
    return out


if __name__ == "__main__":
    main()
