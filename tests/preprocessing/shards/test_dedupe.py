"""`dalle-lean shards dedupe`: of pictures with the same codes the first stays, whatever shard it is in."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from dalle_lean.errors import UserError
from preprocessing.encoding.encode import preprocess
from preprocessing.shards.dedupe import dedupe, first_of_each
from preprocessing.shards.files import write_shard
from preprocessing.shards.import_shards import import_shards
from preprocessing.shards.verify import find_faults
from preprocessing.sources import open_source
from tests.preprocessing.runs import contents, run_command
from tests.preprocessing.shard_folders import make_rows, random_codes, stored_rows, write_folder, write_published


def rows_of(folder):
    return list(stored_rows(folder))


@pytest.fixture
def folder(tmp_path, vqgan):
    """Four shards: the second has copies of some rows of the first and of its own, the third is all copies."""
    codes = np.unique(random_codes(vqgan, 150), axis=0)[:100]
    np.random.default_rng(0).shuffle(codes)
    first, second, last = codes[:40], np.concatenate([codes[40:60], codes[30:45], codes[60:70]]), codes[70:]
    parts = [make_rows(part, seed) for seed, part in enumerate((first, second, codes[5:25], last))]
    (tmp_path / "shards").mkdir()
    return write_folder(tmp_path / "shards", vqgan, parts, rejected={"nsfw": 3})


def slow_first_rows(rows):
    """The rows to keep, by a set of all codes so far."""
    seen, kept = set(), []
    for row in rows:
        if row["codes"].tobytes() not in seen:
            kept.append(row["key"])
        seen.add(row["codes"].tobytes())
    return kept


def test_the_first_row_of_each_picture_stays(folder, tmp_path, vqgan):
    progress = []
    info = dedupe(folder, tmp_path / "out", on_progress=lambda *step: progress.append(step))
    assert [row["key"] for row in rows_of(tmp_path / "out")] == slow_first_rows(rows_of(folder))
    assert find_faults(tmp_path / "out", vqgan=vqgan) == []
    assert (info.counts.seen, info.counts.kept, info.counts.rejected) == (138, 100, {"nsfw": 3, "same_codes": 35})
    assert progress[-1][:2] == (270, 270)


def test_shards_are_as_if_they_had_been_written_so(folder, tmp_path, vqgan):
    """Thinned out: the bytes of the rows that are left. Nothing lost: copied. Everything lost: not there."""
    dedupe(folder, tmp_path / "out")
    rows = make_rows(np.stack([row["codes"] for row in rows_of(folder)[40:85]]), seed=1)
    kept = set(slow_first_rows(rows_of(folder)))
    expected = tmp_path / "expected.parquet"
    write_shard(expected, [row for row in rows if row.key in kept], vqgan=vqgan.fingerprint())
    assert (tmp_path / "out" / "shard-00001.parquet").read_bytes() == expected.read_bytes()
    for name in ("shard-00000.parquet", "shard-00003.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert sorted(contents(tmp_path / "out")) == [
        "dataset.json",
        *(f"shard-0000{number}.parquet" for number in (0, 1, 3)),
    ]


def test_files_that_others_published_keep_all_their_columns(tmp_path, vqgan):
    published = tmp_path / "published"
    published.mkdir()
    codes = np.unique(random_codes(vqgan, 300), axis=0)
    write_published(published / "part-0.parquet", codes, row_group_size=90)
    write_published(published / "part-1.parquet", np.concatenate([codes[:50], (codes[:20] + 1) % 64]))
    import_shards(published, vqgan)
    dedupe(published, tmp_path / "out")
    assert find_faults(tmp_path / "out", vqgan=vqgan) == []
    before, after = (pq.read_table(root / "part-1.parquet") for root in (published, tmp_path / "out"))
    assert after.schema.equals(before.schema)
    kept = [int(row["key"]) for row in rows_of(tmp_path / "out")[len(codes) :]]
    assert kept
    assert max(kept) < 70
    assert after.equals(before.take(kept))


def test_copies_of_pictures_go_with_all_their_views(discs, tmp_path, vqgan, capsys):
    """Real pictures, mirrored: the sum of a folder and its copy is the folder's own shards."""
    settings = {"batch_size": 8, "flip": True}
    preprocess(open_source(discs, 10), tmp_path / "once", vqgan, **settings)
    lines = [json.loads(line) for line in (discs / "metadata.jsonl").read_text().splitlines()]
    for line in lines:
        shutil.copy(discs / line["file_name"], discs / f"copy-{line['file_name']}")
    copies = [{**line, "file_name": f"copy-{line['file_name']}"} for line in lines]
    (discs / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines + copies))
    preprocess(open_source(discs, 10), tmp_path / "twice", vqgan, **settings)
    once = dedupe(tmp_path / "once", tmp_path / "once_deduped")
    info = dedupe(tmp_path / "twice", tmp_path / "twice_deduped")
    assert info.counts.further_views == info.counts.kept == once.counts.kept
    assert info.counts.rejected["same_codes"] == once.counts.rejected["same_codes"] + 30
    assert info.shards == once.shards
    assert run_command("shards", "verify", tmp_path / "twice_deduped") == 0
    assert f"{info.counts.kept} pictures in {info.num_rows} rows, all sound" in capsys.readouterr().out


KILLED = """
import os, signal, sys
from preprocessing.shards import dedupe
write_record, calls = dedupe.write_record, []
def killed(*arguments):
    calls.append(arguments)
    if len(calls) == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    write_record(*arguments)
dedupe.write_record = killed
dedupe.dedupe({folder!r}, {out!r}, threads=1)
"""


@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_and_makes_the_same_bytes(folder, tmp_path, number):
    script = KILLED.format(number=number, folder=str(folder), out=str(tmp_path / "out"))
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == -9
    assert not (tmp_path / "out" / "dataset.json").exists()
    (tmp_path / "out" / ".shard-00001.parquet.x.tmp").write_bytes(b"half")
    assert dedupe(folder, tmp_path / "out") == dedupe(folder, tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_what_is_done_is_left_alone(folder, tmp_path):
    info = dedupe(folder, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert dedupe(folder, tmp_path / "out") == info
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_the_outcome_has_nothing_more_to_lose(folder, tmp_path):
    info = dedupe(folder, tmp_path / "out")
    again = dedupe(tmp_path / "out", tmp_path / "again")
    assert again.shards == info.shards
    assert again.counts == info.counts


def test_a_changed_shard_is_refused_by_name(folder, tmp_path):
    path = folder / "shard-00002.parquet"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00002.parquet is not the file in dataset.json"):
        dedupe(folder, tmp_path / "out")


def test_a_shard_that_the_disk_cannot_read_is_refused_by_name(folder, tmp_path, unreadable):
    unreadable("shard-00002.parquet")
    with pytest.raises(UserError, match=r"shard-00002.parquet is damaged or no shard: .*Input/output error"):
        dedupe(folder, tmp_path / "out")


def test_a_folder_with_something_else_in_it_is_refused(folder, tmp_path):
    before = contents(folder)
    with pytest.raises(ValueError, match=r"has a dataset.json already, of something else"):
        dedupe(folder, folder)
    assert contents(folder) == before
    (folder / "dataset.json").rename(tmp_path / "dataset.json")
    shutil.copytree(folder, tmp_path / "out")
    shutil.copy(tmp_path / "dataset.json", folder / "dataset.json")
    with pytest.raises(ValueError, match="holds shards of unknown origin"):
        dedupe(folder, tmp_path / "out")


def test_a_hash_is_the_first_where_it_is_not_among_those_before():
    hashes = np.random.default_rng(0).integers(2**64 - 500, 2**64, 2000, dtype=np.uint64)
    expected = [value not in hashes[:place] for place, value in enumerate(hashes)]
    assert first_of_each(hashes).tolist() == expected
    assert first_of_each(hashes[:1]).tolist() == [True]


def test_the_command_says_what_it_left_out(folder, tmp_path, capsys):
    assert run_command("shards", "dedupe", folder, tmp_path / "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 shards, 100 pictures; 35 of 135 left out (same_codes)" in said
