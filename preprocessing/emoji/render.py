"""Drawings to pixels: resvg for the vectors, Pillow to place them on a ground."""

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate

from PIL import Image, ImageOps

from dalle_lean.errors import UserError
from dalle_lean.require import require
from preprocessing.emoji.heldout import PAINTS, WHITE_AND_GREY
from preprocessing.emoji.scenes import CELLS, Picture
from preprocessing.emoji.sets import Drawing

MARGIN_PIXELS = 1  # of a thing's box, on each side
INK = 30  # the lightness of eyes, noses and mouths in white and grey things, 0..255
SMALL_SHARE = 0.1  # of a thing's visible pixels: what is larger is no eye
EDGE_LIGHTNESS = 28  # scaling darkens a part's edge by up to so much, 0..255


def sprite(drawing: Drawing, side: int) -> Image.Image:
    """A drawing in RGBA, cropped to its visible part, the longer side scaled to `side` pixels."""
    resvg = require("resvg_py", extra="dev")
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{drawing.view_box}" width="{2 * side}" height="{2 * side}">{drawing.body}</svg>'
    )
    image = Image.open(io.BytesIO(bytes(resvg.svg_to_bytes(svg_string=svg, skip_system_fonts=True)))).convert("RGBA")
    box = visible(image).getbbox()
    if box is None:
        raise UserError(f"the drawing of {drawing.thing.name!r} in {drawing.set} is empty")
    image = image.crop(box)
    return resized(image, side / max(image.size))


def visible(image: Image.Image) -> Image.Image:
    """The mask of an RGBA image: 255 where it shows anything, else 0."""
    return image.getchannel("A").point([255 if alpha > 8 else 0 for alpha in range(256)])


def resized(image: Image.Image, scale: float) -> Image.Image:
    """An RGBA image scaled with antialiasing; Pillow weighs colours by alpha, so edges keep their colour."""
    width, height = (max(1, round(length * scale)) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def shade(channel: int, light: float) -> int:
    """A colour's channel, 0..255, in the shade for a lightness, 0..1."""
    return min(255, round(channel * (0.7 + 0.3 * light) + 40 * light**3))


def painted(image: Image.Image, paint: str) -> Image.Image:
    """An RGBA image in shades of a colour of `PAINTS`, darker where it was dark, nearly white where it was bright.

    In white and grey, whose shades differ little, what is small and darkest stays dark: eyes, noses and mouths."""
    grey, shown = image.convert("RGB").convert("L"), visible(image)
    lightness = ImageOps.autocontrast(grey, cutoff=1, mask=shown)
    channels = [lightness.point([shade(channel, light / 255) for light in range(256)]) for channel in PAINTS[paint]]
    if paint in WHITE_AND_GREY:
        inked = grey.point([round(255 * share) for share in small_and_dark(grey.histogram(shown))])
        channels = [Image.composite(Image.new("L", image.size, INK), channel, inked) for channel in channels]
    return Image.merge("RGBA", (*channels, image.getchannel("A")))


def small_and_dark(histogram: Sequence[int]) -> list[float]:
    """For each lightness 0..255, how dark it stays, 0..1: wholly if at most half of SMALL_SHARE of the pixels are as
    dark or up to EDGE_LIGHTNESS brighter, not at all from SMALL_SHARE on."""
    pixels_up_to = list(accumulate(histogram))
    shares = [pixels_up_to[min(255, light + EDGE_LIGHTNESS)] / max(1, pixels_up_to[-1]) for light in range(256)]
    return [min(1.0, max(0.0, 2 - 2 * share / SMALL_SHARE)) for share in shares]


def draw(picture: Picture, sprites: Mapping[Drawing, Image.Image], side: int) -> Image.Image:
    """A planned picture, RGB, side x side pixels: its drawings on its ground, each in the middle of its box."""
    canvas = Image.new("RGBA", (side, side), (*picture.ground_rgb, 255))
    for placed in picture.placed:
        box, image = placed.cells * side // CELLS, sprites[placed.drawing]
        thing = resized(image, (box - 2 * MARGIN_PIXELS) / max(image.size))
        if placed.paint is not None:
            thing = painted(thing, placed.paint)
        left, top = (
            cell * side // CELLS + (box - length) // 2 for cell, length in zip(placed.corner, thing.size, strict=True)
        )
        canvas.alpha_composite(thing, (left, top))
    return canvas.convert("RGB")


def png_bytes(picture_and_sprites: tuple[Picture, Mapping[Drawing, Image.Image]], side: int) -> bytes:
    """A planned picture, given with its drawings' sprites, as a PNG file."""
    file = io.BytesIO()
    draw(*picture_and_sprites, side).save(file, format="PNG", compress_level=6)
    return file.getvalue()
