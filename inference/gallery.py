"""What `dalle-lean generate` leaves in a folder: numbered PNGs, a contact sheet and results.json."""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from dalle_lean.files import atomic_write, read_json, write_json
from inference.generator import Picture

TILE_SIDE = 256
MARGIN = 16
CAPTION_HEIGHT = 24
COLUMNS = 4
SLUG_LENGTH = 48


def prompt_folder(out: str | Path, prompts: Sequence[str], index: int) -> Path:
    """Where the pictures of prompt `index` go: `out` itself; with several prompts a numbered, slugged folder in it."""
    return Path(out) if len(prompts) == 1 else Path(out) / f"{index:02d}-{slug(prompts[index])}"


def slug(prompt: str) -> str:
    """The prompt as a file name: lower-case ASCII letters and digits joined by single dashes, never empty."""
    ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_text.lower()).strip("-")
    return words[:SLUG_LENGTH].rstrip("-") or "prompt"


def write_gallery(folder: str | Path, prompt: str, pictures: Sequence[Picture], settings: dict[str, Any]) -> None:
    """Write 00.png, 01.png, ... (best first), contact_sheet.png and results.json; the same input gives the same bytes.

    Each file is written atomically, results.json last; pictures of an earlier, longer gallery there are removed.
    """
    folder = Path(folder)
    earlier = pictures_of(folder)
    names = [f"{place:02d}.png" for place in range(len(pictures))]
    for name, picture in zip(names, pictures, strict=True):
        write_png(folder / name, picture.image)
    write_png(folder / "contact_sheet.png", contact_sheet(prompt, pictures))
    write_json(
        folder / "results.json",
        {
            "prompt": prompt,
            "settings": settings,
            "pictures": [
                {
                    "file": name,
                    "index": picture.index,
                    "score": picture.score,
                    "codes_sha256": codes_sha256(picture.codes),
                }
                for name, picture in zip(names, pictures, strict=True)
            ],
        },
    )
    for name in earlier.difference(names):
        (folder / name).unlink(missing_ok=True)


def pictures_of(folder: Path) -> set[str]:
    """The numbered PNGs that the results.json of a gallery names; none where there is no gallery yet."""
    path = folder / "results.json"
    if not path.is_file():
        return set()
    content = read_json(path)
    pictures = content.get("pictures", []) if isinstance(content, dict) else []
    names = {str(picture.get("file")) for picture in pictures if isinstance(picture, dict)}
    return {name for name in names if re.fullmatch(r"\d{2,}\.png", name)}


def codes_sha256(codes: torch.Tensor) -> str:
    """SHA-256 of a picture's codes as little-endian int32 in raster order."""
    return hashlib.sha256(codes.cpu().numpy().astype("<i4").tobytes()).hexdigest()


def write_png(path: Path, image: Image.Image) -> None:
    with atomic_write(path) as temporary:
        image.save(temporary, format="PNG")


def enlarged(image: Image.Image, side: int = TILE_SIDE) -> Image.Image:
    """The picture at `side` pixels for viewing; a larger one is left as it is."""
    if max(image.size) >= side:
        return image
    scale = side / max(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)


def contact_sheet(prompt: str, pictures: Sequence[Picture]) -> Image.Image:
    """All pictures on one white sheet, the prompt above, each one's place, index and score below it."""
    tiles = [enlarged(picture.image) for picture in pictures]
    side = max((max(tile.size) for tile in tiles), default=TILE_SIDE)
    columns = max(1, min(COLUMNS, len(tiles)))
    rows = -(-len(tiles) // columns)
    cell_width, cell_height = side + MARGIN, side + CAPTION_HEIGHT + MARGIN
    heading_font, caption_font = ImageFont.load_default(20), ImageFont.load_default(14)
    width = MARGIN + columns * cell_width
    heading = wrapped(prompt, heading_font, width - 2 * MARGIN)
    top = MARGIN + 26 * len(heading) + MARGIN // 2
    sheet = Image.new("RGB", (width, top + rows * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for line, text in enumerate(heading):
        draw.text((MARGIN, MARGIN + 26 * line), text, fill="black", font=heading_font)
    for place, (tile, picture) in enumerate(zip(tiles, pictures, strict=True)):
        left = MARGIN + (place % columns) * cell_width
        upper = top + (place // columns) * cell_height
        sheet.paste(tile, (left, upper))
        draw.text((left, upper + side + 4), picture_caption(picture), fill="#555555", font=caption_font)
    return sheet


def picture_caption(picture: Picture) -> str:
    """ "no. 17 - score 0.312", or the number alone where nothing was ranked."""
    return f"no. {picture.index}" + ("" if picture.score is None else f" - score {picture.score:.3f}")


def wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """`text` in lines no wider than `width` pixels where spaces allow it."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
