"""A small data folder as `make data` writes it, of discs on grounds."""

import json
from pathlib import Path

from PIL import Image, ImageDraw

RGB = {
    "red": (220, 40, 40),
    "green": (50, 160, 70),
    "blue": (50, 100, 220),
    "yellow": (250, 215, 50),
    "white": (255,) * 3,
}


def discs(ground: str, *things: tuple[str, float, float], side: int = 64) -> Image.Image:
    """A picture of discs, each (colour, across in 0..1, diameter as a share of the side)."""
    picture = Image.new("RGB", (side, side), RGB[ground])
    draw = ImageDraw.Draw(picture)
    for colour, across, diameter in things:
        x, y, radius = across * side, side / 2, diameter * side / 2
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=RGB[colour])
    return picture


def line(text: str, held_out: str | None = None, **facts: object) -> dict:
    return {
        "text": text,
        "kind": "scene",
        "things": ["ball"],
        "ground": "white",
        "paint": None,
        "size": None,
        "place": None,
        "held_out": held_out,
        **facts,
    }


def pair(text: str, first: str, second: str, place: str) -> dict:
    return line(text, "thing pair", kind="pair", things=[f"{first} circle", f"{second} circle"], place=place)


HELDOUT = [
    (line("a ball on a green ground", "ground", ground="green"), discs("green", ("red", 0.5, 0.5))),
    (line("a big ball on a blue ground", "ground", ground="blue", size="big"), discs("blue", ("red", 0.5, 0.8))),
    (line("a ball on a red ground", "ground", ground="red", size="small"), discs("red", ("blue", 0.5, 0.3))),
    (line("a small ball on a red ground", "ground", ground="red", size="small"), discs("red", ("blue", 0.5, 0.3))),
    (
        line("a yellow ball on a white ground", "paint", kind="painted", paint="yellow"),
        discs("white", ("yellow", 0.5, 0.5)),
    ),
    (
        pair("a red circle left of a blue circle", "red", "blue", "left of"),
        discs("white", ("red", 0.25, 0.4), ("blue", 0.75, 0.4)),
    ),
    (
        pair("a green circle to the right of a red circle", "green", "red", "right of"),
        discs("white", ("green", 0.75, 0.4), ("red", 0.25, 0.4)),
    ),
    (
        pair("a red circle and a green circle", "red", "green", "left of"),
        discs("white", ("red", 0.25, 0.4), ("green", 0.75, 0.4)),
    ),
    (
        line("two green balls", "paint", kind="painted-count", paint="green", count=2),
        discs("white", ("green", 0.25, 0.35), ("green", 0.75, 0.35)),
    ),
    (
        line(
            "a green ball to the right of a red cube",
            "thing pair",
            kind="painted-pair",
            things=["ball", "cube"],
            paint="green",
            paints=["green", "red"],
            place="right of",
        ),
        discs("white", ("red", 0.25, 0.35), ("green", 0.75, 0.35)),
    ),
    (line("a cube", "concept", things=["cube"]), discs("white", ("green", 0.5, 0.9))),
]
TRAIN = [
    *((line(f"a {colour} ball"), discs("white", (colour, 0.5, 0.6))) for colour in ("red", "green", "blue")),
    (line("a ball", kind="plain"), discs("white", ("red", 0.5, 0.9))),
]


def write_data(folder: Path) -> Path:
    """train/ and heldout/."""
    for name, content in (("heldout", HELDOUT), ("train", TRAIN)):
        (folder / name).mkdir(parents=True)
        lines = []
        for number, (facts, picture) in enumerate(content):
            picture.save(folder / name / f"{number}.png")
            lines.append(json.dumps({"file_name": f"{number}.png", **facts}))
        (folder / name / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder
