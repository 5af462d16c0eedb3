"""What a run of preprocessing has finished: notes that let a killed run go on, and the sum they come to.

In the output folder, `.progress/settings.json` says what was begun and `.progress/part-00000.json`, ... what became of
each part of the source. Once `dataset.json` is there, the notes go.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalle_lean.files import atomic_write, read_json, write_json
from preprocessing.shards import Counts, Shard

FOLDER = ".progress"


@dataclass(frozen=True)
class Rejection:
    """A picture that is not used, and why."""

    key: str
    reason: str
    detail: str = ""


def begin(out: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings in a fresh folder, or check them against those of the run to be continued."""
    path = out / FOLDER / "settings.json"
    if path.exists():
        refuse_other_settings(out, read_json(path), settings)
    elif any(out.glob("shard-*.parquet")):
        raise ValueError(f"{out} holds shards of unknown origin; choose another folder or remove them")
    else:
        write_json(path, settings)


def refuse_other_settings(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if changed:
        listed = "; ".join(f"{name} was {before.get(name)}, now {now.get(name)}" for name in changed)
        raise ValueError(f"{out} was begun with other settings ({listed}): choose another folder or remove it")


def note_path(out: Path, part: int) -> Path:
    return out / FOLDER / f"part-{part:05d}.json"


def is_finished(out: Path, part: int) -> bool:
    """Whether a part has its note, and the shard that the note speaks of."""
    if not note_path(out, part).exists():
        return False
    shard = read_json(note_path(out, part))["shard"]
    return shard is None or (out / shard["file"]).exists()


def write_note(path: Path, shard: Shard | None, rejections: Sequence[Rejection]) -> None:
    """Say what became of a part. Written after its shard: a part without a note is done again."""
    rejected = [asdict(rejection) for rejection in rejections]
    write_json(path, {"shard": asdict(shard) if shard else None, "rejected": rejected})


def gather(out: Path, num_parts: int) -> tuple[Counts, tuple[Shard, ...]]:
    """Add the notes up to the counts and the shards of the whole, and write the rejections to `rejected.jsonl`.

    ValueError where nothing was kept; the notes are then gone, so that the mended source can be tried again.
    """
    shards: list[Shard] = []
    reasons: Counter[str] = Counter()
    with atomic_write(out / "rejected.jsonl") as temporary, temporary.open("w", encoding="utf-8") as lines:
        for part in range(num_parts):
            note = read_json(note_path(out, part))
            if note["shard"]:
                shards.append(Shard(**note["shard"]))
            for rejection in note["rejected"]:
                reasons[rejection["reason"]] += 1
                lines.write(json.dumps(rejection) + "\n")
    kept = sum(shard.rows for shard in shards)
    if not kept:
        remove_traces(out)
        listed = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        raise ValueError(f"no picture of the source can be used ({listed}); {out / 'rejected.jsonl'} names each")
    counts = Counts(seen=kept + reasons.total(), kept=kept, rejected=dict(sorted(reasons.items())))
    return counts, tuple(shards)


def remove_traces(out: Path) -> None:
    """Remove the notes and what killed runs left half written."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    for leftover in out.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
