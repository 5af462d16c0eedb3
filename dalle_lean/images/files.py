"""Picture files -> bytes -> squares of pixels.

Files may come from anywhere: each is decoded correctly or refused with a reason.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from torch import Tensor

# Formats whose decoders have long met hostile files; none that starts other programs, as EPS does.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
PICTURE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
MAX_PICTURE_BYTES = 64 * 2**20
MAX_PIXELS = 2**26
# Resizing first averages whole pixels down to this multiple of the target: several times faster, hardly visible.
REDUCING_GAP = 3.0
BAND_PIXELS = 2**20


class UnusablePicture(ValueError):
    """A picture that cannot be decoded. `reason` is "picture_broken", "too_many_pixels" or "too_much_memory"; for a
    file also a problem of `read_picture`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason

    @property
    def sentence(self) -> str:
        """Reason and detail for a person."""
        return f"{self.reason.replace('_', ' ')}, {self}"


def lies_in(folder: Path, path: Path) -> bool:
    """Whether a path, with links resolved, is inside a folder; also true if it cannot be resolved, so not opened."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a zero byte
        return True


def read_picture(path: Path) -> tuple[bytes, str | None]:
    """The bytes of a file, and its problem if it has one: "picture_missing", "picture_unreadable", "file_too_large"."""
    try:
        if not path.is_file():  # a pipe or a device would block or never end
            return b"", "picture_missing"
        with path.open("rb") as file:
            picture = file.read(MAX_PICTURE_BYTES + 1)
    except (OSError, ValueError):
        return b"", "picture_unreadable"
    return (b"", "file_too_large") if len(picture) > MAX_PICTURE_BYTES else (picture, None)


def open_picture_file(path: Path) -> Image.Image:
    """`open_picture` of a file; raises UnusablePicture also if the file cannot be read."""
    picture, problem = read_picture(path)
    if problem is not None:
        raise UnusablePicture(problem, f"it must be a file of at most {MAX_PICTURE_BYTES // 2**20} MiB")
    return open_picture(picture)


def open_picture(picture: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read a picture's header, which gives size and mode; no pixel is decoded yet. Raises UnusablePicture for an
    unknown format and for more than `max_pixels`."""
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
    """The largest square of an opened picture, resized with antialiasing to [side, side, 3], RGB, 0..255.

    The picture is rotated by its EXIF orientation, put on white where it is transparent and reduced from 16 bits to 8;
    of an animation the first frame is used. Raises UnusablePicture for broken data or too little memory.

    Args:
        place: where the square lies along the longer side: 0 at the left or top, 0.5 in the centre, 1 at the other end.
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


def read_square(path: Path, side: int | None = None) -> NDArray[np.uint8]:
    """`square_pixels` of a file, at `side` pixels or its own size; raises UnusablePicture also if it cannot be read."""
    with quiet_pillow():
        image = open_picture_file(path)
        return square_pixels(image, side or min(image.size))


def reduced_square(image: Image.Image, left: int, top: int, edge: int, reduction: int) -> Image.Image:
    """A square of `image` in RGB, reduced to the means of `reduction` x `reduction` pixels, at the far edges of fewer.

    It works band by band: the whole picture at once would take four times the memory.
    """
    reduced_edge = -(-edge // reduction)
    square = Image.new("RGB", (reduced_edge, reduced_edge))
    rows = reduction * max(1, BAND_PIXELS // (edge * reduction))
    for row in range(0, edge, rows):
        band = image.crop((left, top + row, left + edge, top + min(row + rows, edge)))
        square.paste(on_white(band).reduce(reduction), (0, row // reduction))
    return square


def on_white(image: Image.Image) -> Image.Image:
    """An image of 8 or 16 bits a channel, in any mode -> RGB, transparent parts on white."""
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
    """Silence Pillow's warnings of oddities that it can decode; failures still raise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def broken(error: Exception) -> UnusablePicture:
    reason = "too_much_memory" if isinstance(error, MemoryError) else "picture_broken"
    detail = re.sub(r" at 0x[0-9a-f]+", "", str(error))  # memory addresses differ in every run
    return UnusablePicture(reason, f"{type(error).__name__}: {detail}")


def to_uint8(pixels: "Tensor") -> "Tensor":
    """Pixels in 0..1 -> uint8 of the same shape."""
    return (pixels * 255).round().byte()
