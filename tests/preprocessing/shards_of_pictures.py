"""Real pictures as others write them: tars and Parquet of img2dataset's layout."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def emoji_rows(emoji: Path, count: int) -> list[dict]:
    """img2dataset's rows for the first pictures: its metadata, and the JPEG under "jpg"."""
    rows = []
    for number, line in enumerate((emoji / "metadata.jsonl").read_text().splitlines()[:count]):
        listed = json.loads(line)
        with Image.open(emoji / listed["file_name"]) as image:
            picture = encoded(image.convert("RGB"), "JPEG", quality=95)
        rows.append(
            {
                "caption": listed["text"],
                "url": f"https://example.org/{number}.png",
                "NSFW": "UNLIKELY",
                "key": f"{number:09d}",
                "status": "success",
                "error_message": None,
                "width": 96,
                "height": 96,
                "original_width": 512 + number,
                "original_height": 512,
                "exif": "{}",
                "jpg": picture,
            }
        )
    return rows


def tar_members(rows: list[dict]) -> list[tuple[str, bytes]]:
    """Names and contents in the order in which img2dataset writes them."""
    members = []
    for row in rows:
        metadata = {name: value for name, value in row.items() if name != "jpg"}
        members += [
            (f"{row['key']}.jpg", row["jpg"]),
            (f"{row['key']}.txt", (row["caption"] or "").encode()),
            (f"{row['key']}.json", json.dumps(metadata, indent=4).encode()),
        ]
    return members


def tar_bytes(members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1_600_000_000.25  # img2dataset's are fractions, which take a header of their own
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_parquet(path: Path, rows: list[dict], **options) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)


def read_all(source) -> list:
    return [sample for part in range(len(source.parts)) for sample in source.samples(part)]


def problems(samples) -> list[str | None]:
    return [sample.problem for sample in samples]
