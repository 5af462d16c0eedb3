"""The PNG files to download, with text chunks that tell how to draw them again."""

from pathlib import Path

from demo.service.drawing_service import Done
from inference.gallery import picture_metadata, png_bytes, prompt_metadata


def write_pictures(drawn: Done, folder: Path) -> list[Path]:
    """Write one PNG for each picture; the file names hold nothing that a user typed."""
    request = drawn.request
    shared = prompt_metadata(request.prompt, drawn.described)
    paths = []
    for picture in drawn.pictures:
        path = folder / f"dalle_lean-seed{request.settings.seed}-no{picture.index}.png"
        path.write_bytes(png_bytes(picture.image, shared | picture_metadata(picture)))
        paths.append(path)
    return paths
