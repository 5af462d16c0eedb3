"""Pictures with captions, and the batches a CLIP learns from.

Shapes: N pictures, B pictures of a batch, S side in pixels.
"""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dalle_lean.errors import UserError
from dalle_lean.images import files as pictures
from dalle_lean.progress import OnProgress
from training.data.pixels import Pixels, in_file, in_memory, stamp
from training.data.remote_io import silent
from training.run.progress import OnNotice

CAPTION_FIELDS = ("text", "caption")

Facts = dict[str, str]
"""What a line says in some fields, each value as JSON; without the fields that the line lacks."""


@dataclass(frozen=True, eq=False)
class ImageTextPairs:
    """Pictures and their captions."""

    pixels: Pixels
    captions: list[str]
    """Or other labels."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines of the listing that could not be used, counted by reason."""
    facts: list[Facts] = field(default_factory=list)
    """What else their lines say; may be empty."""

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, rows: Sequence[int]) -> "ImageTextPairs":
        """The pictures of these rows."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return replace(
            self,
            pixels=self.pixels.take(chosen),
            captions=[self.captions[row] for row in rows],
            facts=[self.facts[row] for row in rows if self.facts],
        )


def read_captioned(
    folder: Path,
    side: int,
    on_progress: OnProgress | None = None,
    *,
    fields: Sequence[str] = (),
    label_of: Callable[[dict[str, Any]], str] | None = None,
    read: Callable[[Path, str, int], Tensor] | None = None,
    store: Path | None = None,
    on_notice: OnNotice = silent,
) -> ImageTextPairs:
    """Read a folder as `datasets`' ImageFolder has it: pictures, and metadata.jsonl with file_name and text or caption.

    Pictures become side x side as `dalle_lean.images.files` makes them. A line that cannot be used
    is counted under its reason; ValueError when none can.

    Args:
        fields: of the lines, kept as `facts`.
        label_of: what a line says of its picture, and stands in `captions`; `caption_of` unless told.
        read: (folder, file_name, side) -> uint8 [3, side, side]; `read_picture` unless told.
        store: a file for the decoded pictures, in which a later call finds them; else they are in memory.
        on_notice: told what the file takes.
    """
    label_of, read = label_of or caption_of, read or read_picture
    listing = folder / "metadata.jsonl"
    if not listing.is_file():
        raise UserError(f"{folder} has no metadata.jsonl; give a folder of pictures with one line of JSON for each")
    lines = [line for line in listing.read_bytes().split(b"\n") if line.strip()]

    def fill(pixels: Tensor) -> dict[str, Any]:
        used: list[int] = []
        skipped: Counter[str] = Counter()
        for number, line in enumerate(lines):
            try:
                entry = parse_line(line)
                label_of(entry)
                pixels[len(used)] = read(folder, entry["file_name"], side)
                used.append(number)
            except Unusable as reason:
                skipped[str(reason)] += 1
            if on_progress is not None and ((number + 1) % 500 == 0 or number + 1 == len(lines)):
                on_progress(number + 1, len(lines), f"{skipped.total()} unusable" if skipped else "")
        return {"used": used, "skipped": skipped}

    if store is None:
        pixels, said = in_memory(len(lines), side, fill)
    else:
        made_from = stamp(folder, names_in(lines), side, hashlib.sha256(b"\n".join(lines)).hexdigest())
        pixels, said = in_file(store, made_from, len(lines), side, fill, on_notice)
    entries = [parse_line(lines[number]) for number in said["used"]]
    captions = [label_of(entry) for entry in entries]
    skipped = Counter(said["skipped"])
    if not captions:
        raise UserError(f"{listing}: no line can be used: {dict(skipped) or 'it is empty'}")
    facts = [facts_of(entry, fields) for entry in entries]
    return ImageTextPairs(Pixels(pixels[: len(captions)]), captions, skipped, facts)


def names_in(lines: Sequence[bytes]) -> Iterator[str]:
    """The file_name of each line that has one."""
    for line in lines:
        try:
            yield parse_line(line)["file_name"]
        except Unusable:
            continue


class Unusable(Exception):
    """A line of a listing is passed over; the message is the reason it is counted under."""


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of metadata.jsonl, which has a file_name."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise Unusable("line is not JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        raise Unusable("no file_name")
    return entry


def caption_of(entry: dict[str, Any]) -> str:
    """The caption that a line tells."""
    caption = next((entry[name] for name in CAPTION_FIELDS if isinstance(entry.get(name), str)), "").strip()
    if not caption:
        raise Unusable("no caption")
    return caption


def facts_of(entry: dict[str, Any], fields: Sequence[str]) -> Facts:
    """What a line says in these fields."""
    return {name: json.dumps(entry[name], sort_keys=True) for name in fields if name in entry}


def read_picture(folder: Path, name: str, side: int) -> Tensor:
    """One picture as uint8 [3, side, side]."""
    path = folder / name
    if not pictures.lies_in(folder, path):
        raise Unusable("file_name leads out of the folder")
    content, problem = pictures.read_picture(path)
    if problem is not None:
        raise Unusable(problem.replace("_", " "))
    try:
        with pictures.quiet_pillow():
            square = pictures.square_pixels(pictures.open_picture(content), side)
    except pictures.UnusablePicture as error:
        raise Unusable(error.reason.replace("_", " ")) from None
    return torch.tensor(square).permute(2, 0, 1)


def digest(data: ImageTextPairs) -> str:
    """SHA-256 over pictures, captions and facts."""
    running = hashlib.sha256("\n".join(data.captions).encode("utf-8", "surrogatepass"))
    if any(data.facts):
        running.update(json.dumps(data.facts, sort_keys=True).encode())
    for pixels in data.pixels.chunks():
        running.update(pixels.numpy().data)
    return running.hexdigest()


def hold_out(data: ImageTextPairs, share: float, seed: int) -> tuple[ImageTextPairs, ImageTextPairs]:
    """(the rest, the held-out part): whole captions are held out, so that none of them is in the rest."""
    distinct = sorted(set(data.captions))
    if len(distinct) < 2:
        raise UserError("all captions are the same; nothing can be held out or learnt")
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {distinct[index] for index in order[: math.ceil(share * len(distinct))]}
    rows: dict[bool, list[int]] = {False: [], True: []}
    for row, caption in enumerate(data.captions):
        rows[caption in chosen].append(row)
    return data.take(rows[False]), data.take(rows[True])


def caption_key(caption: str) -> str:
    """The same for captions that differ in capitals and spaces only."""
    return " ".join(caption.lower().split())


def distinct_batches(captions: Sequence[str], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of rows, shuffled anew in each pass, none holding a caption twice.

    Two pictures of one caption would count as each other's negatives. A row whose caption the batch has already goes
    into the next one; the batches that a pass leaves unfilled are dropped.
    """
    keys = [caption_key(caption) for caption in captions]
    if not 2 <= batch_size <= len(set(keys)):
        raise UserError(f"batch_size={batch_size}: must be in 2..{len(set(keys))}, the number of different captions")
    for epoch in itertools.count():
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        unfilled: list[dict[str, int]] = []
        for row in order:
            batch = next((batch for batch in unfilled if keys[row] not in batch), None)
            if batch is None:
                unfilled.append(batch := {})
            batch[keys[row]] = row
            if len(batch) == batch_size:
                unfilled.remove(batch)
                yield list(batch.values())


def jitter(pixels: Tensor, generator: torch.Generator, shift: float = 0.06, scale: float = 0.1) -> Tensor:
    """Move each picture [B, 3, S, S] by up to `shift` of its side and scale it by up to 1 +- `scale`; edges go on.

    No mirroring and no change of colour: captions speak of left, right and colours.
    """
    draws = torch.rand(len(pixels), 3, generator=generator) * 2 - 1
    theta = torch.zeros(len(pixels), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 + scale * draws[:, 0]
    theta[:, :, 2] = 2 * shift * draws[:, 1:]  # in grid units the side is 2
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid.to(pixels.device), padding_mode="border", align_corners=False)
