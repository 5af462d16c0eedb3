"""`python -m preprocessing.emoji.slim PACKAGES OUT`: what `preprocessing.emoji` reads, in a third of the bytes.

Icons of which nothing is drawn are left out; the same pictures are drawn from what remains.
"""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from dalle_lean.files import read_json
from preprocessing.emoji.sets import MOST_DRAWING_BYTES, SETS, read_drawings, read_things

EMOJIBASE = ("en/data.json", "meta/groups.json", "package.json")
NAMES = (*SETS, "emojibase-data")
ICONIFY = ("chars.json", "info.json", "package.json")


def slim(packages: Path, out: Path) -> None:
    """Copy what is drawn of SETS from npm's node_modules `packages` to the folder `out`."""
    dropped: Counter[str] = Counter()
    bodies: dict[str, set[str]] = {name: set() for name in SETS}
    for drawing in read_drawings(packages, read_things(packages / "emojibase-data", dropped), dropped):
        bodies[drawing.set].add(drawing.body)
    files = [f"emojibase-data/{file}" for file in EMOJIBASE]
    for name in SETS:
        folder = f"@iconify-json/{name}"
        files += [f"{folder}/{file}" for file in ICONIFY]
        content = read_json(packages / folder / "icons.json", MOST_DRAWING_BYTES)
        content["icons"] = {icon: svg for icon, svg in content["icons"].items() if svg["body"] in bodies[name]}
        (out / folder).mkdir(parents=True, exist_ok=True)
        (out / folder / "icons.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    files += [path.relative_to(packages).as_posix() for path in packages.rglob("LICENSE*") if path.parent.name in NAMES]
    for file in files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(packages / file, out / file)


if __name__ == "__main__":
    slim(Path(sys.argv[1]), Path(sys.argv[2]))
