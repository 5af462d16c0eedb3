"""Uploaded files may be anything."""

import io

import pytest
from PIL import Image

from demo.upload import MAX_UPLOAD_BYTES, open_upload


def encoded(image, kind):
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_common_formats_are_read(kind):
    assert open_upload(encoded(Image.new("RGB", (40, 30), "red"), kind)).size == (40, 30)


@pytest.mark.parametrize(
    ("upload", "said"),
    [
        (b"", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (encoded(Image.new("RGB", (40, 30)), "PPM"), "not a picture"),
        (encoded(Image.new("RGB", (40, 30)), "EPS"), "not a picture"),
        (encoded(Image.new("1", (20000, 20000)), "PNG"), "too large"),
        (bytes(MAX_UPLOAD_BYTES + 1), "16 MiB; a picture may have 16"),
    ],
)
def test_everything_else_is_refused_in_a_sentence(upload, said):
    with pytest.raises(ValueError, match=said):
        open_upload(upload)


def test_a_picture_cut_short_is_refused_when_it_is_read(studio):
    whole = encoded(Image.effect_noise((200, 200), 80), "PNG")
    with pytest.raises(ValueError, match="picture"):
        studio.read_upload(whole[: len(whole) // 2])
