import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageSequence

from dalle_lean.images import files as pictures
from dalle_lean.images.files import UnusablePicture, open_picture, square_pixels

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def save(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def square(picture: bytes, side: int = 8) -> np.ndarray:
    return square_pixels(open_picture(picture), side)


def smooth_picture(width: int, height: int) -> Image.Image:
    """Slow waves of colour: nothing in it is lost by halving it."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    channels = [np.sin(5 * x + 2 * y), np.cos(3 * x - 4 * y), np.sin(7 * y)]
    return Image.fromarray((np.stack(channels, axis=-1) * 100 + 128).astype(np.uint8))


@pytest.mark.parametrize("size", [(90, 60), (60, 90)])
def test_the_centre_square_is_kept(size):
    image = Image.new("RGB", size, RED)
    edge = min(size)
    left, top = (size[0] - edge) // 2, (size[1] - edge) // 2
    image.paste(GREEN, (left, top, left + edge, top + edge))
    assert (square(save(image), side=60) == GREEN).all()
    assert (square(save(image), side=16) == GREEN).all()


def test_a_picture_of_the_right_size_is_untouched():
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    assert (square(save(Image.fromarray(pixels)), side=16) == pixels).all()


def test_shrinking_averages_instead_of_picking_pixels():
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    inner = square(save(Image.fromarray(stripes)), side=8)[1:-1, 1:-1]
    assert abs(inner.astype(int) - 127).max() <= 2


def test_shrinking_agrees_with_the_mean_of_each_block():
    pixels = np.asarray(smooth_picture(128, 128))
    means = pixels.reshape(16, 8, 16, 8, 3).mean(axis=(1, 3))
    assert abs(square(save(Image.fromarray(pixels)), side=16) - means).max() < 4


def test_a_jpeg_decoded_small_agrees_with_one_decoded_whole():
    picture = save(smooth_picture(1000, 700), "JPEG", quality=95)
    small = open_picture(picture)
    fast = square_pixels(small, side=32)
    slow = square(save(Image.open(io.BytesIO(picture)), "PNG"), side=32)
    assert small.size < (1000, 700)  # the short cut was taken
    assert abs(fast.astype(int) - slow).max() <= 4


@pytest.mark.parametrize("size", [(300, 300), (301, 433), (700, 257), (97, 640)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA"])
@pytest.mark.parametrize("band_pixels", [1, 5000, 2**20])
def test_shrinking_some_rows_after_the_other_is_shrinking_all_at_once(monkeypatch, size, mode, band_pixels):
    monkeypatch.setattr(pictures, "BAND_PIXELS", band_pixels)
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(noise).convert("RGB").convert(mode)
    edge = min(size)
    left, top = (size[0] - edge) // 2, (size[1] - edge) // 2
    whole = image.convert("RGB").crop((left, top, left + edge, top + edge))
    expected = np.asarray(whole.resize((16, 16), Image.Resampling.LANCZOS, reducing_gap=pictures.REDUCING_GAP))
    assert (square(save(image, "TIFF"), side=16) == expected).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotated_pictures_stand_upright(orientation):
    image = Image.new("RGB", (30, 20), WHITE)
    image.paste(RED, (5, 0, 15, 10))
    image.paste(BLUE, (15, 10, 25, 20))
    # What a camera stores is the inverse of what the orientation asks the viewer to do.
    turn = Image.Transpose
    stored = {
        1: [],
        2: [turn.FLIP_LEFT_RIGHT],
        3: [turn.ROTATE_180],
        4: [turn.FLIP_TOP_BOTTOM],
        5: [turn.TRANSPOSE],
        6: [turn.ROTATE_90],
        7: [turn.TRANSVERSE],
        8: [turn.ROTATE_270],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    rotated = image
    for step in stored:
        rotated = rotated.transpose(step)
    assert (square(save(rotated, exif=exif), side=20) == square(save(image), side=20)).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparent_parts_stand_on_white(mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    pixels = square(save(image.convert(mode), "TIFF" if mode == "PA" else "PNG"))
    assert (pixels[:, :4] == 0).all()
    assert (pixels[:, 4:] == 255).all()


def test_half_transparent_is_half_white():
    assert abs(square(save(Image.new("RGBA", (8, 8), (255, 0, 0, 128)))).astype(int) - (255, 127, 127)).max() <= 1


@pytest.mark.parametrize("format", ["GIF", "PNG"])
def test_a_transparent_palette_colour_stands_on_white(format):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*BLUE, *RED])
    image.paste(1, (0, 0, 8, 4))
    pixels = square(save(image, format, transparency=0))
    assert (pixels[:4] == RED).all()
    assert (pixels[4:] == WHITE).all()


@pytest.mark.parametrize(
    ("image", "format", "colour"),
    [
        (Image.new("P", (8, 8), 0), "PNG", (0, 0, 0)),
        (Image.new("1", (8, 8), 1), "PNG", WHITE),
        (Image.new("L", (8, 8), 77), "PNG", (77, 77, 77)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF", RED),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", RED),
        (Image.new("LAB", (8, 8), (255, 128, 128)), "TIFF", WHITE),
    ],
)
def test_other_colour_modes(image, format, colour):
    assert abs(square(save(image, format)).astype(int) - colour).max() <= 3


def test_sixteen_bits_become_eight():
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16)
    image = Image.fromarray(np.tile(ramp, (64, 1)))
    pixels = square(save(image), side=64)
    assert image.mode == "I;16"
    assert (pixels[0, :, 0] == (ramp / 257).round()).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_an_agreed_range_are_refused(mode):
    with pytest.raises(UnusablePicture, match=f"mode {mode}"):
        square(save(Image.new(mode, (8, 8)), "TIFF"))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_taken(format):
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    options = {"lossless": True} if format == "WEBP" else {}
    picture = save(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(picture))))) == 3
    assert (square(picture) == RED).all()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and brings no pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(9000, 9000), (50_000, 50_000), (2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused_by_its_header(size):
    with pytest.raises(UnusablePicture) as refusal:
        open_picture(png_header(*size))
    assert refusal.value.reason == "too_many_pixels"


def test_the_pixel_limit_is_inclusive():
    picture = save(Image.new("RGB", (10, 10)))
    assert open_picture(picture, max_pixels=100).size == (10, 10)
    with pytest.raises(UnusablePicture, match="10x10 pixels; at most 99"):
        open_picture(picture, max_pixels=99)


@pytest.mark.parametrize("garbage", [b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9", b"<svg/>"])
def test_what_is_no_picture_is_broken(garbage):
    with pytest.raises(UnusablePicture) as refusal:
        open_picture(garbage)
    assert refusal.value.reason == "picture_broken"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_picture_is_broken(format):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    picture = save(Image.fromarray(noise), format)
    with pytest.raises(UnusablePicture) as refusal:
        square(picture[: len(picture) // 2])
    assert refusal.value.reason == "picture_broken"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_bytes_never_raise_anything_else(format):
    random = np.random.default_rng(1)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = save(smooth_picture(40, 30), format, **({} if format in ("GIF", "BMP") else {"exif": exif}))
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(picture)
        for position in random.integers(0, len(picture), random.integers(1, 12)):
            damaged[position] = random.integers(0, 256)
        try:
            assert square(bytes(damaged)).shape == (8, 8, 3)
            outcomes.add("right")
        except UnusablePicture as refusal:
            outcomes.add(refusal.reason)
    assert "picture_broken" in outcomes
