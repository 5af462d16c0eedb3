"""Reads the npm packages: things (names, tags, groups) and their drawings."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json
from preprocessing.emoji.choice import drop_reason
from preprocessing.emoji.names import SHAPES, caption_name, contains_words

MOST_DRAWING_BYTES = 2**28
BUNDLED_SET = "fluent-emoji-flat"
"""The set that the bundled model learns from; any other emoji set of iconify's can be drawn too."""
CODE_POINT_SETS = ("noto", "noto-v1", "twemoji", "fluent-emoji", BUNDLED_SET)
"""Sets that are searched for the code points of icon names, which all sets share."""


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A Unicode emoji, as captions name it."""

    name: str
    tags: tuple[str, ...]
    group: str
    """Emojibase's group ("animals-nature", ...), or "shape" for coloured hearts, circles, squares and books."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One set's drawing of one thing."""

    thing: Thing
    set: str
    body: str  # SVG elements without the outer <svg>
    view_box: str


def read_things(emojibase: Path, dropped: Counter[str]) -> dict[str, Thing]:
    """Things by code points ("2764"), from an `emojibase-data` package; counts what it leaves out by reason."""
    groups = read_json(emojibase / "meta" / "groups.json")
    things: dict[str, Thing] = {}
    names: set[str] = set()
    for entry in read_json(emojibase / "en" / "data.json"):
        group = groups["groups"].get(str(entry.get("group")), "none")
        subgroup = groups["subgroups"].get(str(entry.get("subgroup")), "none")
        dropped["skin-tone variant"] += len(entry.get("skins", ()))
        if reason := drop_reason(entry["label"], group, subgroup):
            dropped[reason] += 1
            continue
        name = caption_name(entry["label"], subgroup)
        if name in names:
            raise UserError(f"two emoji are named {name!r}; give one of them another name in names.RENAMED")
        names.add(name)
        shape = name.split(" ")[0] in SHAPES.get(name.rpartition(" ")[2], ())
        # English words only: no emoticons, numbers or accents.
        words = [tag for tag in entry.get("tags", ()) if tag.isascii() and tag.replace(" ", "").isalpha()]
        tags = tuple(tag for tag in words if not contains_words(name, tag))
        things[code_key(entry["hexcode"])] = Thing(name=name, tags=tags, group="shape" if shape else group)
    return things


def read_drawings(
    packages: Path, things: Mapping[str, Thing], dropped: Counter[str], sets: Sequence[str] = (BUNDLED_SET,)
) -> list[Drawing]:
    """The drawings of `things` in `sets`, in order of set and name; counts what it leaves out by reason.

    `packages` is npm's node_modules. Not every set has the code points of its icons. Sets share icon names, so an icon
    gets its code point from any of CODE_POINT_SETS and `sets` that has it.
    """
    known_sets = list(dict.fromkeys([*CODE_POINT_SETS, *sets]))
    icons = {name: read_icons(packages, name, "icons.json") for name in known_sets}
    codes: dict[str, str] = {}
    for name in known_sets:
        for char, icon in read_icons(packages, name, "chars.json").items():
            codes.setdefault(icon, code_key(char))
    for content in icons.values():
        for alias, target in content.get("aliases", {}).items():
            if alias in codes and len(target) == 1:
                codes.setdefault(target["parent"], codes[alias])

    drawings: list[Drawing] = []
    for set_name in sets:
        content = icons[set_name]
        drawn: set[str] = set()
        for icon, svg in sorted(content["icons"].items()):
            code = codes.get(icon)
            if code is None:
                dropped["icon without a code point"] += 1
            elif code not in things:
                dropped["icon of a thing left out"] += 1
            elif code in drawn:
                dropped["second icon of one code point"] += 1
            else:
                drawn.add(code)
                width, height = (svg.get(key, content.get(key, 16)) for key in ("width", "height"))
                view_box = f"{svg.get('left', 0)} {svg.get('top', 0)} {width} {height}"
                drawings.append(Drawing(thing=things[code], set=set_name, body=svg["body"], view_box=view_box))
    if not drawings:
        raise UserError(f"{packages}: no icon of {', '.join(sets)} matches a name of emojibase")
    return drawings


def read_icons(packages: Path, name: str, file: str) -> dict[str, Any]:
    """A JSON file of an iconify package; UserError if the package is not installed."""
    package = packages / "@iconify-json" / name
    if not package.is_dir():
        raise UserError(f"{packages} has no @iconify-json/{name}; install it with npm, as `make data` does")
    return dict(read_json(package / file, MOST_DRAWING_BYTES))


def code_key(code: str) -> str:
    """A code point sequence in lower case, without variation selectors."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def by_thing(drawings: Iterable[Drawing]) -> dict[str, list[Drawing]]:
    """Drawings by the name of their thing, in the given order."""
    groups: dict[str, list[Drawing]] = {}
    for drawing in drawings:
        groups.setdefault(drawing.thing.name, []).append(drawing)
    return groups
