"""Records of the parts that preprocessing has finished: they let a killed run continue, and add up to the counts.

In the output folder, `.progress/settings.json` holds the settings and `.progress/part-NAME.json` the outcome of each
part of the source. They are removed once `dataset.json` is there. Any number of machines may write into one folder:
every file is written atomically, and all machines write the same bytes.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, read_json, write_json
from preprocessing.encoding.decoding import Rejection
from preprocessing.shards.manifest import Counts, Shard, read_manifest


def records_folder(out: Path) -> Path:
    return out / ".progress"


def begin(out: Path, settings: Mapping[str, Any], shards: str = "shard-*.parquet") -> None:
    """Record the settings in a folder without `shards`, or check that they are those of the run to continue.
    FileNotFoundError if another machine has just finished and removed the records."""
    path = records_folder(out) / "settings.json"
    if not path.exists():
        if any(out.glob(shards)):
            raise UserError(f"{out} holds shards of unknown origin; choose another folder or remove them")
        write_once(path, settings)
    refuse_other_settings(out, read_json(path), settings)


def recorded_settings(out: Path) -> Mapping[str, Any]:
    """The settings of the run in `out`, finished or not; empty if none has begun."""
    try:
        settings: Mapping[str, Any] = read_json(records_folder(out) / "settings.json")
    except FileNotFoundError:
        return read_manifest(out).settings if (out / "dataset.json").exists() else {}
    return settings


def write_once(path: Path, content: Mapping[str, Any]) -> None:
    """Like `write_json`, but if several machines write at the same moment, the first file stays."""
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
    """UserError, in the words of the command's options, if a folder begun with `before` cannot go on with `now`."""
    changed = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    if not changed:
        return
    again = "choose another folder, or remove it to begin again"
    if "deduped" in changed or changed - {*now} or "source" not in before:
        raise UserError(f"{out} holds shards made of other shards or by another program: choose another folder")
    if changed == {"explain"}:
        raise UserError(f"{out} was begun without --explain, so no reasons were kept: leave it out, {again}")
    words = []
    if "source" in changed:
        words.append("pictures or captions were added, removed or changed since, or this is another source")
        changed -= {"source", "parts", "shard_rows"}  # all three follow from the pictures
    else:
        again = f"use its settings, {again}"
        changed -= {"parts"} if "shard_rows" in changed else set()
    words += [in_option_words(name, before.get(name), now[name]) for name in sorted(changed)]
    raise UserError(f"{out} was begun with other settings ({'; '.join(words)}): {again}")


def in_option_words(name: str, before: Any, now: Any) -> str:
    """What changed, as an option of the command and its values."""
    if name == "vqgan":
        return "--vqgan is another one"
    if name == "precision":
        name, before, now = "bf16", before == "bfloat16", now == "bfloat16"
    if name == "memory_bytes":
        name, before, now = "max_memory", *(value and value // 2**20 for value in (before, now))

    def said(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(value)
        if value is None:
            return "any" if name == "allowed_nsfw" else "off"
        return ("off", "on")[value] if isinstance(value, bool) else str(value)

    return f"--{name.replace('_', '-')} was {said(before)}, now {said(now)}"


def write_record(
    out: Path,
    name: str,
    shard: Shard | None,
    kept: int,
    rejected: Mapping[str, int],
    explained: Sequence[Rejection] = (),
) -> None:
    """Record the outcome of a part after writing its shard (None if nothing was kept). A part without a record is done
    again.

    kept: pictures; a shard can have several rows for each.
    """
    record = {
        "shard": None if shard is None else asdict(shard),
        "kept": kept,
        "rejected": rejected,
        "explained": [asdict(rejection) for rejection in explained],
    }
    write_json(records_folder(out) / f"part-{name}.json", record)


def read_record(out: Path, name: str) -> Any:
    """What `write_record` wrote; it is large if it explains every rejection of a part."""
    return read_json(records_folder(out) / f"part-{name}.json", limit_bytes=2**30)


def is_finished(out: Path, name: str) -> bool:
    """Whether a part has its record, and the shard that the record names."""
    try:
        shard = read_record(out, name)["shard"]
    except FileNotFoundError:
        return False
    return shard is None or (out / shard["file"]).exists()


def finished_names(out: Path) -> set[str]:
    """The names of the parts that have a record."""
    return {path.stem.removeprefix("part-") for path in records_folder(out).glob("part-*.json")}


def gather(out: Path, names: Sequence[str]) -> tuple[Counts, tuple[Shard, ...]]:
    """Add up the records: the counts and the shards of the whole. FileNotFoundError if another machine has just
    gathered and removed the records."""
    kept = 0
    shards: list[Shard] = []
    reasons: Counter[str] = Counter()
    for name in names:
        record = read_record(out, name)
        kept += record["kept"]
        reasons.update(record["rejected"])
        if record["shard"]:
            shards.append(Shard(**record["shard"]))
    rows = sum(shard.rows for shard in shards)
    counts = Counts(
        seen=kept + reasons.total(), kept=kept, rejected=dict(sorted(reasons.items())), further_views=rows - kept
    )
    return counts, tuple(shards)


def write_explanations(out: Path, names: Sequence[str]) -> None:
    """Write each rejection to `rejected.jsonl`, in the order of the source; raises what `gather` does."""
    with atomic_write(out / "rejected.jsonl") as temporary, temporary.open("w", encoding="utf-8") as lines:
        for name in names:
            for rejection in read_record(out, name)["explained"]:
                lines.write(json.dumps(rejection, ensure_ascii=False) + "\n")


def remove_leftovers(out: Path) -> None:
    """Remove the records and the temporary files of killed runs. The records go all at once: a few left without their
    settings could be mistaken for another run's."""
    records = records_folder(out)
    with suppress(FileNotFoundError):  # another machine was faster
        records.rename(records.with_name(f"{records.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"))
    for leftover in out.glob(f"{records.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in ("*.parquet", "dataset.json", "rejected.jsonl"):
        for leftover in out.glob(f".{name}.*.tmp"):
            leftover.unlink(missing_ok=True)
