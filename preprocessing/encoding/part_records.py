"""What a run of preprocessing has finished: notes that let a killed run go on, and the sum they come to.

In the output folder, `.progress/settings.json` says what was begun and `.progress/part-NAME.json` what became of each
part of the source. Once `dataset.json` is there, the notes go. Any number of machines may write into one folder: each
file is made whole or not at all, and whoever makes it makes the same bytes.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, read_json, write_json
from preprocessing.encoding.decoding import Rejection
from preprocessing.shards.manifest import PACKED, Counts, Shard, read_manifest


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """What became of a part."""

    shard: Shard | None
    """None where nothing was kept."""
    kept: int
    """Pictures; a shard can have several rows for each."""
    rejected: Mapping[str, int]
    explained: Sequence[Rejection] = field(default_factory=tuple)


def notes_folder(out: Path) -> Path:
    return out / ".progress"


def note_path(out: Path, name: str) -> Path:
    return notes_folder(out) / f"part-{name}.json"


def begin(out: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings in a fresh folder, or check them against those of the run to be continued.

    FileNotFoundError where another machine finishes at the same moment and has removed the notes already.
    """
    path = notes_folder(out) / "settings.json"
    if not path.exists():
        if any(out.glob("shard-*.parquet")):
            raise UserError(f"{out} holds shards of unknown origin; choose another folder or remove them")
        write_first(path, settings)
    refuse_other_settings(out, read_json(path), settings)


def noted_settings(out: Path) -> Mapping[str, Any]:
    """The settings of the run that `out` is of, finished or not; empty where none was begun."""
    try:
        noted: Mapping[str, Any] = read_json(notes_folder(out) / "settings.json")
    except FileNotFoundError:
        return read_manifest(out).settings if (out / "dataset.json").exists() else {}
    return noted


def write_first(path: Path, content: Mapping[str, Any]) -> None:
    """As `write_json`, but of machines that begin at the same moment one is the first, and its file stays."""
    write_json(mine := path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"), content)
    try:
        os.link(mine, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        write_json(path, content)
    finally:
        mine.unlink(missing_ok=True)


def refuse_other_settings(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if before.get("layout") == "packed":
        raise UserError(f"{out} was begun with shards {PACKED}")
    names = {*before, *now} - {"layout"}  # earlier versions noted it
    if "shard_rows" not in now:  # earlier versions noted it of every source, whether it could be known or not
        names.discard("shard_rows")
    changed = [name for name in sorted(names) if before.get(name) != now.get(name)]
    if changed:
        listed = "; ".join(f"{name} was {before.get(name)}, now {now.get(name)}" for name in changed)
        raise UserError(f"{out} was begun with other settings ({listed}): choose another folder or remove it")


def write_note(out: Path, name: str, note: PartRecord) -> None:
    """Say what became of a part. Written after its shard: a part without a note is done again."""
    write_json(note_path(out, name), asdict(note))


def read_note(out: Path, name: str) -> Any:
    """What `write_note` wrote; each of a part's pictures may be explained in it."""
    return read_json(note_path(out, name), limit_bytes=2**30)


def is_finished(out: Path, name: str) -> bool:
    """Whether a part has its note, and the shard that the note speaks of."""
    try:
        shard = read_note(out, name)["shard"]
    except FileNotFoundError:
        return False
    return shard is None or (out / shard["file"]).exists()


def gather(out: Path, names: Sequence[str]) -> tuple[Counts, tuple[Shard, ...]]:
    """Add the notes up to the counts and the shards of the whole.

    FileNotFoundError where another machine gathers at the same moment and has removed the notes already.
    """
    kept = 0
    shards: list[Shard] = []
    reasons: Counter[str] = Counter()
    for name in names:
        note = read_note(out, name)
        kept += note["kept"]
        reasons.update(note["rejected"])
        if note["shard"]:
            shards.append(Shard(**note["shard"]))
    rows = sum(shard.rows for shard in shards)
    counts = Counts(
        seen=kept + reasons.total(), kept=kept, rejected=dict(sorted(reasons.items())), further_views=rows - kept
    )
    return counts, tuple(shards)


def write_explanations(out: Path, names: Sequence[str]) -> None:
    """Write what was rejected and why to `rejected.jsonl`, in the order of the source; raises as `gather`."""
    with atomic_write(out / "rejected.jsonl") as temporary, temporary.open("w", encoding="utf-8") as lines:
        for name in names:
            for rejection in read_note(out, name)["explained"]:
                lines.write(json.dumps(rejection, ensure_ascii=False) + "\n")


def remove_traces(out: Path) -> None:
    """Remove the notes and what killed runs left half written.

    The notes go all at once: some of them without their settings would pass for those of another run.
    """
    notes = notes_folder(out)
    with suppress(FileNotFoundError):  # another machine was faster
        notes.rename(notes.with_name(f"{notes.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"))
    for leftover in out.glob(f"{notes.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in ("shard-*.parquet", "dataset.json", "rejected.jsonl"):
        for leftover in out.glob(f".{name}.*.tmp"):
            leftover.unlink(missing_ok=True)
