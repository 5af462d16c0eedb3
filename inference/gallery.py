"""The folder that `dalle-lean generate` writes: numbered PNGs, a contact sheet and results.json.

The text chunks of a PNG record how to draw it again.
"""

import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from dalle_lean.draw.fonts import lettering, wrapped, wrapped_within
from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_bytes, write_json
from inference.request import Picture

TILE_SIDE = 256
MARGIN = 16
HEADING_HEIGHT = 26
HEADING_LINES = 2
LINE_HEIGHT = 16
COLUMNS = 4
SLUG_LENGTH = 48


def prompt_folder(out: str | Path, prompts: Sequence[str], index: int) -> Path:
    """The folder for the pictures of prompt `index`: `out` itself, or with several prompts a numbered folder in it."""
    return Path(out) if len(prompts) == 1 else Path(out) / f"{index:02d}-{slug(prompts[index])}"


def other_galleries(out: Path, prompts: Sequence[str]) -> list[Path]:
    """The folders that hold pictures of earlier prompts and get none of these."""
    ours = {prompt_folder(out, prompts, index) for index in range(len(prompts))}
    candidates = [out, *(folder for folder in sorted(out.glob("*")) if re.match(r"\d{2,}-", folder.name))]
    found = []
    for folder in candidates:
        with suppress(UserError, OSError):  # a results.json of another program, or one that may not be read
            if folder not in ours and pictures_of(folder):
                found.append(folder)
    return found


def slug(prompt: str) -> str:
    """The prompt as a file name: lower-case ASCII letters and digits, words joined by single dashes; never empty."""
    ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_text.lower()).strip("-")
    return words[:SLUG_LENGTH].rstrip("-") or "prompt"


def write_gallery(
    folder: str | Path,
    prompt: str,
    pictures: Sequence[Picture],
    settings: dict[str, Any],
    unknown_words: list[str] | None = None,
) -> None:
    """Write 00.png, 01.png, ... (best first), contact_sheet.png and results.json; the same input gives the same bytes.
    Each file is written atomically, results.json last; surplus pictures of an earlier gallery are then removed."""
    folder = Path(folder)
    earlier = pictures_of(folder)
    names = [f"{place:02d}.png" for place in range(len(pictures))]
    for name, picture in zip(names, pictures, strict=True):
        write_png(folder / name, picture.image, prompt_metadata(prompt, settings) | picture_metadata(picture))
    write_png(folder / "contact_sheet.png", contact_sheet(prompt, pictures), prompt_metadata(prompt, settings))
    facts = [{"file": name, **picture_facts(picture)} for name, picture in zip(names, pictures, strict=True)]
    results = {"prompt": prompt, "settings": settings, "unknown_words": unknown_words, "pictures": facts}
    write_json(folder / "results.json", results)
    for name in earlier.difference(names):
        (folder / name).unlink(missing_ok=True)


def pictures_of(folder: Path) -> set[str]:
    """The numbered PNGs that a gallery's results.json names; none if there is no gallery yet. UserError if that file is
    no JSON."""
    path = folder / "results.json"
    if not path.is_file():
        return set()
    content = read_json(path)
    pictures = content.get("pictures") if isinstance(content, dict) else None
    if not isinstance(pictures, list):
        return set()
    names = {str(picture.get("file")) for picture in pictures if isinstance(picture, dict)}
    return {name for name in names if re.fullmatch(r"\d{2,}\.png", name)}


def codes_sha256(codes: torch.Tensor) -> str:
    """SHA-256 of a picture's codes as little-endian int32 in raster order."""
    return hashlib.sha256(codes.cpu().numpy().astype("<i4").tobytes()).hexdigest()


def picture_facts(picture: Picture) -> dict[str, Any]:
    return {"index": picture.index, "score": picture.score, "codes_sha256": codes_sha256(picture.codes)}


def prompt_metadata(prompt: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of all pictures of a prompt: the prompt, its seed, all settings (`Generator.describe`) as JSON, the
    model's hash if known."""
    metadata = {
        "Software": "dalle_lean",
        "prompt": prompt,
        "seed": str(settings["seed"]),
        "settings": json.dumps(settings, ensure_ascii=False),
    }
    if settings.get("model_sha256") is not None:
        metadata["model_sha256"] = settings["model_sha256"]
    return metadata


def picture_metadata(picture: Picture) -> dict[str, str]:
    """Metadata of one picture: its index and, if it was ranked, its score."""
    score = {} if picture.score is None else {"score": f"{picture.score:.6f}"}
    return {"index": str(picture.index), **score}


def png_bytes(image: Image.Image, metadata: Mapping[str, str]) -> bytes:
    """A PNG with `metadata` as text chunks in UTF-8 (iTXt), keys of 1 to 79 Latin-1 letters; the same call gives the
    same bytes. Characters of values that a chunk cannot hold are replaced."""
    chunks = PngInfo()
    for key, value in metadata.items():
        # NUL would end the text. Lone surrogates stand for command-line bytes that are not UTF-8.
        readable = re.sub("[\0\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", value)
        chunks.add_itxt(key, readable)
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=chunks)
    return file.getvalue()


def write_png(path: Path, image: Image.Image, metadata: Mapping[str, str]) -> None:
    write_bytes(path, png_bytes(image, metadata))


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """The picture enlarged to `side` pixels for viewing; a larger one is returned as it is."""
    if max(image.size) >= side:
        return image
    scale = side / max(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)


def contact_sheet(prompt: str, pictures: Sequence[Picture]) -> Image.Image:
    """All pictures on one sheet: the prompt as heading, below each picture its index and score."""
    scores = ["" if picture.score is None else f" - score {picture.score:.3f}" for picture in pictures]
    captions = [f"no. {picture.index}{score}" for picture, score in zip(pictures, scores, strict=True)]
    return tile_sheet([picture.image for picture in pictures], captions, heading=prompt)


def tile_sheet(
    pictures: Sequence[Image.Image],
    captions: Sequence[str],
    side: int = TILE_SIDE,
    caption_lines: int = 1,
    heading: str = "",
) -> Image.Image:
    """A white sheet with rows of four pictures at `side` pixels or more, each caption cut to `caption_lines`. The
    heading is cut to HEADING_LINES."""
    tiles = [enlarged(picture, side) for picture in pictures]
    side = max((max(tile.size) for tile in tiles), default=side)
    columns = max(1, min(COLUMNS, len(tiles)))
    rows = -(-len(tiles) // columns)
    cell_width, cell_height = side + MARGIN, side + caption_lines * LINE_HEIGHT + MARGIN
    heading, heading_font = lettering(heading, 20)
    width = MARGIN + columns * cell_width
    lines = wrapped_within(heading, heading_font, width - 2 * MARGIN, HEADING_LINES) if heading else []
    top = MARGIN + HEADING_HEIGHT * len(lines)
    sheet = Image.new("RGB", (width, top + rows * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, text in enumerate(lines):
        draw.text((MARGIN, MARGIN + HEADING_HEIGHT * row), text, fill="black", font=heading_font)
    for place, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        left = MARGIN + place % columns * cell_width
        upper = top + place // columns * cell_height
        sheet.paste(tile, (left, upper))
        draw.rectangle((left - 1, upper - 1, left + tile.width, upper + tile.height), outline="#dddddd")
        caption, font = lettering(caption, 13)
        for row, text in enumerate(wrapped(caption, font, side)[:caption_lines]):
            draw.text((left, upper + side + 3 + LINE_HEIGHT * row), text, fill="#333333", font=font)
    return sheet
