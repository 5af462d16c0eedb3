"""Writes tests/data/emoji: 200 pictures of the Apache-2.0 drawings of noto, drawn as `make data` draws them.

Run after `make data`: .venv/bin/python tests/data/make_emoji.py
"""

import json
from collections import Counter
from pathlib import Path

from preprocessing.emoji.heldout import hold_out
from preprocessing.emoji.plan import plan_training
from preprocessing.emoji.render import png_bytes, sprite
from preprocessing.emoji.sets import read_drawings, read_things

PACKAGES = Path("data/npm/node_modules")
FOLDER = Path(__file__).parent / "emoji"
SIDE = 96
COUNTS = {"plain": 110, "scene": 50, "pair": 20, "painted": 10, "count": 10}


def main() -> None:
    """Draw the first pictures of each kind in the shuffled plan."""
    dropped: Counter[str] = Counter()
    drawings = read_drawings(PACKAGES, read_things(PACKAGES / "emojibase-data", dropped), dropped, ["noto"])
    plan = plan_training(drawings, hold_out(drawings), seed=0)
    pictures = [p for kind, count in COUNTS.items() for p in [p for p in plan if p.kind == kind][:count]]
    sprites = {placed.drawing: sprite(placed.drawing, SIDE) for picture in pictures for placed in picture.placed}
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for index, picture in enumerate(pictures):
            name = f"{index:03d}.png"
            (FOLDER / name).write_bytes(png_bytes((picture, sprites), SIDE))
            metadata.write(json.dumps({"file_name": name, **picture.facts()}) + "\n")


if __name__ == "__main__":
    main()
