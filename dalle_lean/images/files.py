"""A picture's file -> its bytes -> a square of pixels.

Pictures come from anywhere: each is right or refused with a reason.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

# Formats whose decoders are widely exposed to hostile files; never those that start other programs (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
PICTURE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
MAX_PICTURE_BYTES = 64 * 2**20
MAX_PIXELS = 2**26
# Resizing first averages whole pixels, down to this many times the target: several times faster, hardly visible.
REDUCING_GAP = 3.0
BAND_PIXELS = 2**20


class UnusablePicture(ValueError):
    """A picture that cannot be turned into pixels.

    `reason` is "picture_broken", "too_many_pixels" or "too_much_memory"; of a file also what `read_picture` finds.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason

    @property
    def sentence(self) -> str:
        """Reason and detail for a person."""
        return f"{self.reason.replace('_', ' ')}, {self}"


def lies_in(folder: Path, path: Path) -> bool:
    """Whether what a path leads to, through whatever links, is below a folder, or nothing that could be opened."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a zero byte
        return True


def read_picture(path: Path) -> tuple[bytes, str | None]:
    """The bytes of a file and what is wrong with it, if anything: "picture_missing", "file_too_large", ..."""
    try:
        if not path.is_file():  # a pipe or a device would block or never end
            return b"", "picture_missing"
        with path.open("rb") as file:
            picture = file.read(MAX_PICTURE_BYTES + 1)
    except (OSError, ValueError):
        return b"", "picture_unreadable"
    return (b"", "file_too_large") if len(picture) > MAX_PICTURE_BYTES else (picture, None)


def open_picture_file(path: Path) -> Image.Image:
    """`open_picture` of a file; also raises UnusablePicture for one that cannot be read."""
    picture, problem = read_picture(path)
    if problem is not None:
        raise UnusablePicture(problem, f"a regular file of at most {MAX_PICTURE_BYTES:,} bytes is needed")
    return open_picture(picture)


def open_picture(picture: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read a picture's header: size and mode are known, no pixel is decoded yet.

    Raises UnusablePicture for what is no picture of a known format, or is larger than `max_pixels`.
    """
    try:
        image = Image.open(io.BytesIO(picture), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise UnusablePicture("too_many_pixels", str(error)) from None
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise broken(error) from None
    if image.width * image.height > max_pixels:
        raise UnusablePicture("too_many_pixels", f"{image.width}x{image.height} pixels; at most {max_pixels}")
    return image


def square_pixels(image: Image.Image, side: int, place: float = 0.5) -> NDArray[np.uint8]:
    """The largest square of an opened picture at side x side pixels, antialiased: [side, side, 3], RGB, 0..255.

    `place` is where along the longer side it is cut: 0 the left or top end, 0.5 the centre, 1 the other end. Turned
    upright by its EXIF orientation, transparent parts on white, 16 bits brought to 8, the first frame of an animation.
    Raises UnusablePicture for broken data, and where the memory does not suffice.
    """
    try:
        # A JPEG decodes at 1/2, 1/4 or 1/8 of its size at a fraction of the cost.
        image.draft(None, (round(side * REDUCING_GAP), round(side * REDUCING_GAP)))
        ImageOps.exif_transpose(image, in_place=True)
        edge = min(image.size)
        left, top = int((image.width - edge) * place), int((image.height - edge) * place)
        reduction = max(1, int(edge / side / REDUCING_GAP))
        square = reduced_square(image, left, top, edge, reduction)
        box = (0, 0, edge / reduction, edge / reduction)
        square = square.resize((side, side), Image.Resampling.LANCZOS, box=box)
        return np.asarray(square)
    except Exception as error:  # as above
        raise broken(error) from None


def reduced_square(image: Image.Image, left: int, top: int, edge: int, reduction: int) -> Image.Image:
    """The mean of every `reduction` x `reduction` pixels of a square of `image`, in RGB, the last ones of fewer.

    Some rows after the other: all at once takes four times the memory of a large picture.
    """
    reduced_edge = -(-edge // reduction)
    square = Image.new("RGB", (reduced_edge, reduced_edge))
    rows = reduction * max(1, BAND_PIXELS // (edge * reduction))
    for row in range(0, edge, rows):
        band = image.crop((left, top + row, left + edge, top + min(row + rows, edge)))
        square.paste(on_white(band).reduce(reduction), (0, row // reduction))
    return square


def on_white(image: Image.Image) -> Image.Image:
    """Any mode of 8 or 16 bits -> RGB, transparent parts on white."""
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips at 255
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no agreed range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Pillow warns of many oddities that do not stop it; what does is counted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def broken(error: Exception) -> UnusablePicture:
    reason = "too_much_memory" if isinstance(error, MemoryError) else "picture_broken"
    detail = re.sub(r" at 0x[0-9a-f]+", "", str(error))  # addresses, which are others every time
    return UnusablePicture(reason, f"{type(error).__name__}: {detail}")
