"""An uploaded picture, which may be anything."""

from PIL import Image

from dalle_lean.errors import UserError
from dalle_lean.images.files import MAX_PICTURE_BYTES, UnusablePicture, open_picture

MAX_UPLOAD_BYTES = MAX_PICTURE_BYTES // 4
NO_PICTURE = "the file is not a picture that can be read; take a PNG, JPEG, WebP, GIF, BMP or TIFF"


def open_upload(upload: bytes) -> Image.Image:
    """The picture in a file's bytes, its header read; ValueError, in a sentence for the page, for anything else."""
    if len(upload) > MAX_UPLOAD_BYTES:
        raise UserError(f"the file has {len(upload) / 2**20:.0f} MiB; a picture may have {MAX_UPLOAD_BYTES // 2**20}")
    try:
        return open_picture(upload)
    except UnusablePicture as unusable:
        if unusable.reason == "too_many_pixels":
            raise UserError(f"the picture is too large: {unusable}") from None
        raise UserError(NO_PICTURE) from None
