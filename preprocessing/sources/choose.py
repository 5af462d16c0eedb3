"""Which source a path or a name means."""

from pathlib import Path

from preprocessing.sources.folder import CaptionedFolder, ListedFolder
from preprocessing.sources.sample import Source


def open_source(source: str | Path, part_rows: int) -> Source:
    """The source at `source`, cut into parts of `part_rows` samples; ValueError where there is nothing to read."""
    path = Path(source)
    if part_rows < 1:
        raise ValueError(f"part_rows={part_rows}: must be positive")
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; a source is a folder of pictures with captions")
    if (path / "metadata.jsonl").is_file():
        return ListedFolder(path, part_rows)
    if nested := sorted(str(listing.parent) for listing in path.glob("*/metadata.jsonl")):
        # Splits such as held-out pictures must not be swept up by naming their parent.
        raise ValueError(f"{path} has no metadata.jsonl, but folders in it have one: take one of {', '.join(nested)}")
    return CaptionedFolder(path, part_rows)
