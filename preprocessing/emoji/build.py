"""Draws the planned pictures with several processes into a folder that `datasets` reads as an ImageFolder, with the
licences of the drawings beside it."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

from PIL.Image import Image

from dalle_lean.errors import UserError
from dalle_lean.images.image_folder import LISTING
from dalle_lean.io.files import read_json, write_json
from dalle_lean.progress import OnProgress, unwatched
from preprocessing.emoji.heldout import HeldOut, hold_out
from preprocessing.emoji.lookalikes import without_lookalikes
from preprocessing.emoji.plan import COPIES, plan_held_out, plan_training
from preprocessing.emoji.render import png_bytes, sprite
from preprocessing.emoji.scenes import Picture
from preprocessing.emoji.sets import BUNDLED_SET, Drawing, read_drawings, read_things


def build(
    packages: Path,
    out: Path,
    *,
    side: int,
    seed: int,
    processes: int,
    sets: Sequence[str] = (BUNDLED_SET,),
    only_pairs_held_out: bool = False,
    copies: Mapping[str, int] = COPIES,
    fillers: float = 0.0,
    on_progress: OnProgress = unwatched,
) -> dict[str, dict[str, int]]:
    """Write OUT/train, OUT/heldout, OUT/heldout.json and OUT/LICENSES; count what is in and what is left out.

    `packages` is npm's node_modules; pictures are side x side pixels, of the drawings in `sets`. The same seed writes
    the same bytes. `only_pairs_held_out`: training sees every thing, drawing, ground and colour, as a judge of others'
    pictures should. `copies` and `fillers` are those of `plan_training`. Everything is drawn beside OUT first and
    takes its place at the end.

    Raises ValueError if OUT holds something else or the current folder, or a set is not among the packages.
    """
    if not 16 <= side <= 1024:
        raise UserError(f"side={side}: pictures are 16 to 1024 pixels wide")
    if out.exists() and any(out.iterdir()) and not (out / "heldout.json").is_file():
        raise UserError(f"{out} holds something else; name a new or empty folder")
    out = out.resolve()
    if Path.cwd().is_relative_to(out):
        raise UserError(f"{out} is or holds the current folder, which cannot be replaced; name it from outside")
    dropped: Counter[str] = Counter()
    drawings = read_drawings(packages, read_things(packages / "emojibase-data", dropped), dropped, sets)
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    total = len(drawings)
    done = count(1)

    def step(part: str) -> None:
        if (so_far := next(done)) % 100 == 0 or so_far == total:
            on_progress(so_far, total, part)

    with get_context("spawn").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        sprites = {}
        images = pool.imap(partial(sprite, side=side), drawings, chunksize=16)
        for drawing, image in zip(drawings, images, strict=True):
            sprites[drawing] = image
            step("drawings")
        drawings = without_lookalikes(drawings, sprites, dropped)
        held_out = HeldOut() if only_pairs_held_out else hold_out(drawings)
        parts = {
            "train": plan_training(drawings, held_out, seed, copies, fillers),
            "heldout": plan_held_out(drawings, held_out, seed),
        }
        total += sum(map(len, parts.values()))
        for part, pictures in parts.items():
            for _ in write_pictures(pictures, sprites, unfinished / part, side, pool):
                step(part)
    counts = {
        **{part: counted(picture.kind for picture in pictures) for part, pictures in parts.items()},
        "held_out": counted(str(picture.held_out) for picture in parts["heldout"]),
        "left_out": counted(dropped.elements()),
    }
    write_licences(packages, sets, unfinished / "LICENSES")
    write_json(unfinished / "heldout.json", {"seed": seed, "side": side, **held_out.to_json(), "counts": counts})
    if out.exists():
        shutil.rmtree(out)
    os.replace(unfinished, out)
    return counts


def write_pictures(
    pictures: Sequence[Picture], sprites: Mapping[Drawing, Image], folder: Path, side: int, pool: Pool
) -> Iterator[None]:
    """Draw `pictures` into `folder` as 000000.png, ... and metadata.jsonl; yield after each."""
    folder.mkdir(parents=True)
    with (folder / LISTING).open("w", encoding="utf-8") as metadata:
        given = (
            (picture, {placed.drawing: sprites[placed.drawing] for placed in picture.placed}) for picture in pictures
        )
        drawn = pool.imap(partial(png_bytes, side=side), given, chunksize=64)
        for index, (picture, png) in enumerate(zip(pictures, drawn, strict=True)):
            name = f"{index:06d}.png"
            (folder / name).write_bytes(png)
            metadata.write(json.dumps({"file_name": name, **picture.facts()}, ensure_ascii=False) + "\n")
            yield


def counted(words: Iterable[str]) -> dict[str, int]:
    """How often each word comes, by word."""
    return dict(sorted(Counter(words).items()))


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
        write_licence(folder / f"{name}.txt", "\n".join(lines), package)
    package = packages / "emojibase-data"
    about = read_json(package / "package.json")
    author = about["author"] if isinstance(about["author"], str) else about["author"]["name"]
    lines = [
        f"Emojibase by {author}: labels and tags, from which the captions are made.",
        f"Licence: SPDX {about['license']}. Taken from the npm package emojibase-data {about['version']}.",
    ]
    write_licence(folder / "emojibase.txt", "\n".join(lines), package)


def write_licence(path: Path, text: str, package: Path) -> None:
    """Write `text` and the package's licence files."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(package.iterdir()) if file.stem.upper() == "LICENSE"]
    path.write_text("\n\n".join([text, *texts]).rstrip() + "\n", encoding="utf-8")
