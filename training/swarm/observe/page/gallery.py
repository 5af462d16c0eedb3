"""The pictures that a run's checkpoints draw for its fixed prompts: drawn on the host, fetched by other machines."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from PIL import Image

from dalle_lean.errors import UserError, is_whole
from dalle_lean.io.files import atomic_write, link_or_copy, parse, read_text, write_bytes, write_json
from dalle_lean.progress import OnNotice
from training.data.catalog import find_shards
from training.data.heldout import heldout_rows
from training.swarm.config import SwarmSettings
from training.swarm.host.checkpoints import Checkpoint
from training.swarm.preflight.checks import codes_of

NAME = "gallery.json"
PROMPTS = 6
LONGEST_PROMPT = 200
MOST_STEPS = 12  # checkpoints whose pictures are kept: the first, the newest, and evenly spaced ones in between
SIDE = 256
DRAWING_LIMIT_S = 3600.0
FILE = re.compile(r"drawn-[0-9]{6,12}-[0-9]\.webp")
LOG = "log"  # of a program, in its folder
LOW_PRIORITY = ("nice", "-n", "19")
DALLE_LEAN = (sys.executable, "-P", "-c", "from dalle_lean.cli import main; main()")


@dataclass(frozen=True)
class Drawn:
    """The pictures of one checkpoint: a file for each prompt."""

    step: int
    files: list[str]

    def __post_init__(self) -> None:
        if not (is_whole(self.step) and len(self.files) <= PROMPTS and all(map(FILE.fullmatch, self.files))):
            raise UserError(f"the pictures of step {self.step!r} are malformed")


@dataclass(frozen=True)
class Gallery:
    """The content of gallery.json, oldest checkpoint first."""

    prompts: list[str] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse untrusted JSON; ValueError if it is malformed. Cuts what is too long."""
        content = parse(json.loads, text, f"{NAME} is not JSON")
        try:
            prompts = [str(prompt)[:LONGEST_PROMPT] for prompt in content["prompts"][:PROMPTS]]
            return cls(prompts, [Drawn(**drawn) for drawn in content["drawn"][:MOST_STEPS]])
        except (KeyError, TypeError) as error:
            raise UserError(f"{NAME} is malformed: {type(error).__name__} {error}") from None

    @property
    def files(self) -> list[str]:
        return [name for drawn in self.drawn for name in drawn.files]


def read_gallery(folder: Path) -> Gallery:
    """The gallery in a folder; empty if there is none."""
    return Gallery.parse(read_text(folder / NAME)) if (folder / NAME).exists() else Gallery()


def heldout_prompts(settings: SwarmSettings) -> list[str]:
    """Captions of held-out pictures, the same for the whole run."""
    shards = find_shards(settings.swarm.data, codes=codes_of(settings))
    captions = heldout_rows(shards, settings.recipe.data.heldout_share, 8 * PROMPTS).captions
    return [caption for caption in dict.fromkeys(captions) if caption.strip()][:PROMPTS]


def spread(drawn: list[Drawn]) -> list[Drawn]:
    """Thin out to MOST_STEPS: repeatedly drop the one whose neighbours are closest, never the first or the newest."""
    while len(drawn) > MOST_STEPS:
        gaps = [after.step - before.step for before, after in zip(drawn, drawn[2:], strict=False)]
        del drawn[gaps.index(min(gaps)) + 1]
    return drawn


def start_program(
    command: str, checkpoint: Checkpoint, options: Sequence[str], folder: Path
) -> subprocess.Popen[bytes]:
    """Run a command that draws with a checkpoint, without ranking, at the lowest priority, in `folder`.

    There it has its log, and links to the model's files, since donors remove old checkpoints while it still reads.
    Raises OSError if the checkpoint is removed already.
    """
    shutil.rmtree(folder / "model", ignore_errors=True)
    shutil.copytree(checkpoint.folder / "model", folder / "model", copy_function=link_or_copy)
    model = ["--model", str(folder / "model"), "--device", "cpu", "--scorer", "none"]
    with open(folder / LOG, "wb") as file:
        arguments = [*LOW_PRIORITY, *DALLE_LEAN, command, *model, *options]
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def last_line(folder: Path) -> str:
    """The last line that a program wrote in this folder: why it ended."""
    return (folder / LOG).read_text(errors="replace").strip().rpartition("\n")[2]


class Painter:
    """Has `dalle-lean generate` draw the prompts with each new checkpoint, at the lowest priority.

    Args:
        folder: of the gallery and its pictures.
        drawing: a folder for pictures in progress.
        prompts: returns the prompts; called if the folder has no gallery yet.
    """

    def __init__(self, folder: Path, drawing: Path, prompts: Callable[[], list[str]], on_notice: OnNotice):
        self.folder, self.drawing, self.on_notice = folder, drawing, on_notice
        self.gallery = read_gallery(folder)
        if not self.gallery.prompts:
            self.gallery = Gallery([prompt[:LONGEST_PROMPT] for prompt in prompts()])
        self.process: subprocess.Popen[bytes] | None = None
        self.step, self.due_s = -1, 0.0
        """Of the process: its checkpoint's step, and its deadline."""

    def poll(self, newest: Checkpoint | None) -> None:
        """Collect finished pictures, and start drawing with the newest checkpoint; does not block."""
        if self.process is not None:
            if self.process.poll() is None and time.monotonic() < self.due_s:
                return
            self.finish(self.process)
        if newest is None or not self.gallery.prompts or newest.step == self.step:
            return
        if any(drawn.step >= newest.step for drawn in self.gallery.drawn):  # drawn before, or the run was rolled back
            self.keep([drawn for drawn in self.gallery.drawn if drawn.step <= newest.step])
            if any(drawn.step == newest.step for drawn in self.gallery.drawn):
                return
        self.step, self.due_s = newest.step, time.monotonic() + DRAWING_LIMIT_S
        self.clear()
        options = ["--num-images", "1", "--out", str(self.drawing), "--", *self.gallery.prompts]
        try:
            self.process = start_program("generate", newest, options, self.drawing)
        except OSError as error:
            self.on_notice(f"no pictures of step {newest.step}: {error}")

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Add the pictures of a process that has ended or timed out."""
        process.kill()
        self.process, code = None, process.wait()
        found = sorted(self.drawing.rglob("00.png"))
        if code or len(found) != len(self.gallery.prompts):
            self.on_notice(f"no pictures of step {self.step}: {last_line(self.drawing)}")
        else:
            drawn = Drawn(self.step, [f"drawn-{self.step:06d}-{number}.webp" for number in range(len(found))])
            for path, name in zip(found, drawn.files, strict=True):
                with Image.open(path) as picture, atomic_write(self.folder / name) as temporary:
                    picture.thumbnail((SIDE, SIDE))
                    picture.convert("RGB").save(temporary, format="WEBP", quality=90)
            self.keep(spread([*self.gallery.drawn, drawn]))
        self.clear()

    def keep(self, drawn: list[Drawn]) -> None:
        """Write a gallery of these checkpoints only, and remove the pictures of others."""
        self.gallery = Gallery(self.gallery.prompts, drawn)
        write_json(self.folder / NAME, asdict(self.gallery))
        for path in self.folder.glob("drawn-*.webp"):
            if path.name not in self.gallery.files:
                path.unlink()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.drawing, ignore_errors=True)


def mirror(folder: Path, gallery: Gallery, fetch: Callable[[str], bytes | None]) -> Gallery:
    """Fetch missing pictures into `folder`; returns the gallery of the checkpoints whose pictures are complete."""
    for name in gallery.files:
        if not (folder / name).exists() and (content := fetch(name)) and content[8:12] == b"WEBP":
            write_bytes(folder / name, content)
    return Gallery(gallery.prompts, [d for d in gallery.drawn if all((folder / name).exists() for name in d.files)])
