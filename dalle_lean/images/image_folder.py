"""Folders in the layout of `datasets`' ImageFolder: pictures, and a metadata.jsonl with a line of JSON for each.

They may come from anyone: no file outside the folder is opened.
"""

import json
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.images.files import lies_in

LISTING = "metadata.jsonl"

Line = dict[str, Any]
"""A picture's line of the listing, with its file's name in the folder under "file_name"."""


class Unusable(UserError):
    """A line of a listing, or its picture, cannot be used; the message is the reason."""


def parse_line(line: bytes | str) -> Line:
    """Parse a line of a listing; raises Unusable if it is no object with a file_name."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise Unusable("line is not JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise Unusable("no file_name")
    return entry


def listed_file(folder: Path, name: str) -> Path:
    """The file of a line's `file_name`; raises Unusable if it is outside the folder, even through a link."""
    if not lies_in(folder, folder / name):
        raise Unusable("file_name points outside the folder")
    return folder / name
