"""The authors and licences of the drawings, written beside the data."""

from collections.abc import Iterable
from pathlib import Path

from dalle_lean.io.files import read_json


def write_licences(packages: Path, sets: Iterable[str], folder: Path) -> None:
    """Write a file for each package: author, licence, source, version, and the full text if the package has it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sets:
        package = packages / "@iconify-json" / name
        info = read_json(package / "info.json")
        version = read_json(package / "package.json")["version"]
        lines = [
            f"{info['name']} by {info['author']['name']}, {info['author']['url']}",
            f"Licence: {info['license']['title']} (SPDX: {info['license']['spdx']}), {info['license']['url']}",
            f"Taken from the npm package @iconify-json/{name} {version}.",
            "Changes: rendered to pixels, cut to the visible part, resized, and composed on coloured grounds.",
        ]
        write(folder / f"{name}.txt", "\n".join(lines), package)
    package = packages / "emojibase-data"
    about = read_json(package / "package.json")
    author = about["author"] if isinstance(about["author"], str) else about["author"]["name"]
    lines = [
        f"Emojibase by {author}: labels and tags, from which the captions are made.",
        f"Licence: SPDX {about['license']}. Taken from the npm package emojibase-data {about['version']}.",
    ]
    write(folder / "emojibase.txt", "\n".join(lines), package)


def write(path: Path, text: str, package: Path) -> None:
    """Write `text` and the package's licence files."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(package.iterdir()) if file.stem.upper() == "LICENSE"]
    path.write_text("\n\n".join([text, *texts]).rstrip() + "\n", encoding="utf-8")
