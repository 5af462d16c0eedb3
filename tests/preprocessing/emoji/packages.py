"""Small emoji packages in the format of the real ones: five sets of coloured patterns."""

import hashlib
import json
from itertools import count
from pathlib import Path

from preprocessing.emoji.sets import CODE_POINT_SETS

GROUPS = {"groups": {"0": "smileys-emotion", "1": "people-body", "3": "animals-nature", "7": "objects", "9": "flags"}}
SUBGROUPS = {"14": "heart", "23": "person", "34": "animal-mammal", "82": "other-object", "97": "country-flag"}
ANIMALS = "cow fox goat hen ibex jackal kiwi lynx mole newt okapi puma quail raven seal tapir"
OBJECTS = (
    "anvil", "bell", "cup", "drum", "easel", "fork", "glass globe", "golden harp", "iron gate", "jug", "paper kite",
    "old lamp", "mop", "nail", "tin opener", "water wheel",
)  # fmt: skip
HEARTS = "red green"
FILLS = ("#d22", "#2a2", "#22d", "#e92", "#82b", "#111")


def write_packages(folder: Path) -> Path:
    """An npm `node_modules` with about 30 things; returns it."""
    codes = count(0x1F400)
    entries = [entry(next(codes), f"{colour} heart", 0, 14, tags=[colour, "love"]) for colour in HEARTS.split()]
    entries += [entry(next(codes), name, 3, 34, tags=["animal", f"{name} farm"]) for name in ANIMALS.split()]
    entries += [entry(next(codes), name, 7, 82, tags=["thing", "cow tool", ":-)"]) for name in OBJECTS]
    entries += [entry(next(codes), "flag: Nowhere", 9, 97), with_skins(entry(next(codes), "man: beard", 1, 23))]

    emojibase = folder / "emojibase-data"
    write(emojibase / "meta" / "groups.json", {**GROUPS, "subgroups": SUBGROUPS})
    write(emojibase / "en" / "data.json", entries)
    write(emojibase / "package.json", {"version": "0.0.1", "license": "MIT", "author": "Nobody"})
    (emojibase / "LICENSE").write_text("The whole text of a licence.\n")
    for index, name in enumerate(CODE_POINT_SETS):
        icons = {icon_name(e["label"]): {"body": body(e["label"], index)} for e in entries}
        chars = {e["hexcode"].lower(): icon_name(e["label"]) for e in entries}
        package = folder / "@iconify-json" / name
        write(package / "icons.json", {"icons": icons, "width": 32, "height": 32, "aliases": {}})
        # As in the real packages, not every set tells its code points.
        write(package / "chars.json", chars if index % 2 == 0 else {})
        licence = {"title": "Free", "spdx": "CC0-1.0", "url": "licence page"}
        write(package / "info.json", {"name": name, "author": {"name": "A hand", "url": "a page"}, "license": licence})
        write(package / "package.json", {"version": "1.2.3"})
    return folder


def entry(code: int, label: str, group: int, subgroup: int, tags: list[str] | None = None) -> dict:
    return {
        "label": label,
        "hexcode": f"{code:X}",
        "group": group,
        "subgroup": subgroup,
        "order": code,
        "tags": tags or [],
    }


def with_skins(person: dict) -> dict:
    tones = ("light", "medium-light", "medium", "medium-dark", "dark")
    skins = [
        {"label": f"{person['label']}: {tone} skin tone", "hexcode": f"{person['hexcode']}-1F3F{letter}"}
        for tone, letter in zip(tones, "BCDEF", strict=True)
    ]
    return {**person, "order": 8, "skins": skins}


def icon_name(label: str) -> str:
    return label.replace(": ", "-").replace(" ", "-").lower()


def body(label: str, hand: int) -> str:
    """Bars and squares on a 4 x 4 grid, by the label; the hand moves one of them. No two labels draw the same."""
    bits = hashlib.sha256(label.encode()).digest()
    fill = FILLS[bits[2] % len(FILLS)]
    cells = [cell for cell in range(16) if bits[cell // 8] >> (cell % 8) & 1 or cell in (0, 15)]
    squares = [f'<rect x="{cell % 4 * 8}" y="{cell // 4 * 8}" width="8" height="8" fill="{fill}"/>' for cell in cells]
    return "".join(squares) + f'<circle cx="{10 + 3 * hand}" cy="16" r="2" fill="#999"/>'


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
