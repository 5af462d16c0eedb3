"""Reads the config.json of a folder of one kind; if it is of another kind, says which and where the right one is."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_format, read_json

MODEL_FORMAT = "dalle_lean_model/1"
KINDS = {
    "dalle_lean_model": "a model folder",
    "dalle_lean_vqgan": "a VQGAN folder",
    "dalle_lean_clip": "a CLIP folder",
    "dalle_lean_things": "a classifier folder",
}
"""By the name of the format in config.json, without its version."""
PLACES = ("model", "vqgan", "clip", "classifier", "model/vqgan", "model/clip")
"""Where the folders of models and of training runs have these folders."""


def read_folder_config(folder: str | Path, expected: str) -> dict[str, Any]:
    """The config.json of a folder, whose format must be `expected`; UserError if there is none."""
    folder = Path(folder)
    kind = kind_of(expected)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}{perhaps_beside(folder)}; name {kind}")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not {kind}: it has no config.json{advice(folder, expected)}")
    content = read_json(path)
    found = kind_of(content.get("format")) if isinstance(content, dict) else ""
    if found and found != kind:
        raise UserError(f"{folder} is {found}, not {kind}{advice(folder, expected)}")
    return read_format(path, expected)


def perhaps_beside(folder: Path) -> str:
    """ " (did you mean runs/shards?)": a folder beside a missing one with a close name; empty if there is none."""
    try:
        beside = {path.name: path for path in folder.parent.iterdir() if path.is_dir()}
    except OSError:
        return ""
    close = get_close_matches(folder.name, beside, n=1)
    return f" (did you mean {beside[close[0]]}?)" if close else ""


def kind_of(name: object) -> str:
    """The kind of folder whose format has this name; empty if there is none."""
    return KINDS.get(name.partition("/")[0], "") if isinstance(name, str) else ""


def advice(folder: Path, expected: str) -> str:
    """The end of an error message: the folder of the expected format in `folder` or around it, if there is one."""
    checkpoints = sorted(folder.glob("checkpoints/step-*/model"), reverse=True)
    for place in (*(folder / name for name in PLACES), *checkpoints[:1], folder.parent):
        try:
            read_format(place / "config.json", expected)
        except (OSError, UserError):
            continue
        return f"; did you mean {place}?"
    return ""
