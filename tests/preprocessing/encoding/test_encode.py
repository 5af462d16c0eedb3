import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dalle_lean import cli
from dalle_lean.io.files import sha256_file
from preprocessing.encoding import encode
from preprocessing.encoding import part_records as progress
from preprocessing.encoding.batches import Batch, PartBuffer
from preprocessing.encoding.decode_pool import DecodePool
from preprocessing.encoding.decoding import Decoding, Rejection
from preprocessing.encoding.encode import Reporter, make_nothing, preprocess
from preprocessing.encoding.filters import Rules
from preprocessing.encoding.pipeline import Encoder, EncodingJob, prepare
from preprocessing.shards.files import open_stream, read_dataset_info
from preprocessing.sources import open_source
from preprocessing.sources.folder import ListedFolder
from preprocessing.sources.tar import TarShards

ROOT = Path(__file__).parents[3]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_command(*arguments) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    return exit.value.code


def add_lines(folder: Path, *rows: dict) -> None:
    with (folder / "metadata.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_the_codes_are_those_of_each_picture_encoded_by_itself(discs, vqgan, tmp_path):
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=3)
    streamed = list(open_stream(tmp_path / "out"))
    assert info.num_codes == 4
    assert len(streamed) == 30
    for index, row in enumerate(streamed):
        image = Image.open(discs / f"{index:03d}.png")
        left = (image.width - 24) // 2
        image = image.crop((left, 0, left + 24, 24)).resize((16, 16), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        assert row["codes"].tolist() == vqgan.encode(pixels)[0].tolist()
        assert row["caption"].endswith(f"disc, number {index}")
        assert row["key"] == f"{index:03d}.png"


def test_everything_seen_is_kept_or_rejected_for_a_reason_and_named(discs, vqgan, tmp_path):
    whole = (discs / "000.png").read_bytes()
    (discs / "cut.png").write_bytes(whole[: len(whole) // 2])
    (discs / "text.png").write_text("no picture")
    Image.new("RGB", (61, 30)).save(discs / "wide.png")
    Image.new("RGB", (300, 300)).save(discs / "large.png")
    add_lines(
        discs,
        {"file_name": "cut.png", "text": "a cut picture"},
        {"file_name": "text.png", "text": "a text"},
        {"file_name": "gone.png", "text": "a missing picture"},
        {"file_name": "wide.png", "text": "a wide picture"},
        {"file_name": "large.png", "text": "a large picture"},
        {"file_name": "000.png", "text": "ab"},
        {"file_name": "000.png"},
        {"file_name": "000.png", "text": "a disc", "NSFW": "UNSURE"},
        {"file_name": "000.png", "text": "a disc", "original_width": 0},
        {"file_name": "000.png", "text": "a disc", "original_width": "wide"},
        {"file_name": "000.png", "text": "a disc", "original_width": 900, "original_height": 100},
        {"file_name": "000.png", "text": "a last disc", "NSFW": "UNLIKELY", "url": "http://x", "original_width": 30.0},
    )
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan, max_pixels=50_000, explain=True)
    assert info.counts.seen == 42
    assert info.counts.kept == 31
    assert info.counts.rejected == {
        "aspect_ratio": 2,
        "caption_missing": 1,
        "caption_short": 1,
        "nsfw": 1,
        "picture_broken": 2,
        "picture_missing": 1,
        "size_not_positive": 2,
        "too_many_pixels": 1,
    }
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    named = {rejection["key"]: rejection["reason"] for rejection in rejected}
    assert len(rejected) == 11
    assert named["cut.png"] == named["text.png"] == "picture_broken"
    assert read_dataset_info(tmp_path / "out") == info
    assert [shard.sha256 for shard in info.shards] == [
        sha256_file(tmp_path / "out" / shard.file) for shard in info.shards
    ]
    assert list(open_stream(tmp_path / "out"))[-1]["caption"] == "a last disc"


def test_a_part_of_which_nothing_is_kept_has_no_shard(discs, vqgan, tmp_path):
    for index in range(10, 20):
        (discs / f"{index:03d}.png").write_bytes(b"")
    info = preprocess(open_source(discs, 10), tmp_path / "out", vqgan)
    assert [shard.file for shard in info.shards] == ["shard-00000.parquet", "shard-00002.parquet"]
    assert len(list(open_stream(tmp_path / "out"))) == 20


def test_parts_of_which_nothing_can_be_read_are_counted_as_their_own(discs, vqgan, tmp_path):
    """A part that was killed, or is another machine's, must not take the counts of the next with it."""
    for index in (*range(6), *range(12, 18)):
        (discs / f"{index:03d}.png").unlink()
    whole = preprocess(open_source(discs, 6), tmp_path / "whole", vqgan, explain=True)
    assert whole.counts.rejected == {"picture_missing": 12}
    out = tmp_path / "out"
    assert preprocess(open_source(discs, 6), out, vqgan, explain=True, share=(1, 2)) is None
    for name in ("00000", "00002"):
        note = json.loads((out / ".progress" / f"part-{name}.json").read_text())
        assert (note["rejected"], len(note["explained"])) == ({"picture_missing": 6}, 6)
    preprocess(open_source(discs, 6), out, vqgan, explain=True)
    assert contents(out) == contents(tmp_path / "whole")


def test_the_number_of_workers_changes_nothing(discs, vqgan, tmp_path):
    for workers in (1, 4):
        preprocess(open_source(discs, 8), tmp_path / str(workers), vqgan, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "4")


@pytest.fixture
def torch_threads():
    """Sets torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_batches_encoded_side_by_side_have_the_codes_of_one_after_the_other(discs, vqgan, tmp_path, torch_threads):
    for threads in (1, 3):
        torch_threads(threads)
        with Encoder(vqgan, 4, 16, bf16=False) as encoder:
            assert encoder.at_once == threads
        preprocess(open_source(discs, 8), tmp_path / str(threads), vqgan, batch_size=4)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_encoding_side_by_side_leaves_torch_its_threads(vqgan, torch_threads):
    torch_threads(3)
    with Encoder(vqgan, 4, 16, bf16=False) as encoder:
        assert encoder.threads.submit(torch.get_num_threads).result() == 1
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3


def test_large_batches_are_encoded_one_after_the_other(vqgan, torch_threads):
    torch_threads(3)
    with Encoder(vqgan, 2**10, 256, bf16=False) as encoder:
        assert encoder.at_once == 1
        assert encoder.threads.submit(torch.get_num_threads).result() == 3


def test_every_batch_has_one_size_and_no_part_shares_one(discs, tmp_path):
    job = EncodingJob(
        source=open_source(discs, 8),
        out=tmp_path,
        decoding=Decoding(side=16),
        batch_size=3,
        bf16=False,
        explain=False,
        vqgan="",
        workers=1,
        memory_bytes=2**28,
    )
    with DecodePool(job.decoding, workers=1) as pool:
        events = list(prepare(job, pool, [2, 0], pinned=False))
    batches = [event for event in events if isinstance(event, Batch)]
    assert {event.pixels.shape for event in batches} == {(3, 16, 16, 3)}
    assert [(event.part, len(event.rows), event.seen) for event in batches] == [
        (2, 3, 3),
        (2, 3, 6),
        (2, 2, 8),
        (0, 3, 3),
        (0, 3, 6),
        (0, 2, 8),
    ]
    assert not batches[2].pixels[2].any()


def test_crops_and_mirror_images_are_rows_of_their_own(vqgan, tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16], pixels[4:12, 18:22] = (255, 0, 0), (0, 255, 0)
    Image.fromarray(pixels).save(folder / "wide.png")
    Image.fromarray(pixels[:, :16]).save(folder / "square.png")
    for name in ("wide", "square"):
        (folder / f"{name}.txt").write_text(f"a {name} picture")
    info = preprocess(open_source(folder, 8), tmp_path / "out", vqgan, crops=3, flip=True)
    rows = {row["key"]: row["codes"].tolist() for row in open_stream(tmp_path / "out")}

    def codes(square) -> list[int]:
        return vqgan.encode(torch.from_numpy(square.copy()).permute(2, 0, 1)[None] / 255)[0].tolist()

    expected = {"square.png": codes(pixels[:, :16]), "square.png#1": codes(pixels[:, 15::-1])}
    for number, left in enumerate((0, 8, 16)):
        square = pixels[:, left : left + 16]
        expected[f"wide.png#{2 * number}" if number else "wide.png"] = codes(square)
        expected[f"wide.png#{2 * number + 1}"] = codes(square[:, ::-1])
    assert rows == expected
    assert (info.counts.kept, info.counts.further_views) == (2, 6)
    assert (info.settings["crops"], info.settings["flip"]) == (3, True)
    assert read_dataset_info(tmp_path / "out") == info


def test_copies_within_a_part_are_rejected_and_the_first_is_kept(emoji, vqgan, tmp_path):
    folder = tmp_path / "copies"
    folder.mkdir()
    picture = Image.open(emoji / "000.png").convert("RGB")
    for name, side in (("0.png", 128), ("1.png", 64), ("2.png", 96)):
        picture.resize((side, side)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("the same")
    rules = Rules(max_hash_distance=6)
    info = preprocess(open_source(folder, 2), tmp_path / "out", vqgan, rules=rules, explain=True)
    assert info.counts.rejected == {"duplicate": 1}
    assert json.loads((tmp_path / "out" / "rejected.jsonl").read_text()) == {
        "key": "1.png",
        "reason": "duplicate",
        "detail": "looks like 0.png",
    }
    assert [row["key"] for row in open_stream(tmp_path / "out")] == ["0.png", "2.png"]


def test_reasons_are_counted_always_and_explained_when_asked(discs, vqgan, tmp_path):
    (discs / "003.png").write_bytes(b"no picture")
    plain = preprocess(open_source(discs, 8), tmp_path / "plain", vqgan)
    explained = preprocess(open_source(discs, 8), tmp_path / "explained", vqgan, explain=True)
    assert plain.counts == explained.counts
    assert plain.counts.rejected == {"picture_broken": 1}
    assert not (tmp_path / "plain" / "rejected.jsonl").exists()
    rejection = json.loads((tmp_path / "explained" / "rejected.jsonl").read_text())
    assert (rejection["key"], rejection["reason"]) == ("003.png", "picture_broken")


@pytest.mark.parametrize("explain", [False, True])
def test_a_rejection_is_kept_in_memory_only_to_be_explained(explain):
    part = PartBuffer(0, 32, max_hash_distance=None, explain=explain, pinned=False)
    for row in range(1000):
        part.add(Rejection(f"row {row}", "picture_missing"))
    assert part.rejected == {"picture_missing": 1000}
    assert len(part.explained) == (1000 if explain else 0)


class Counted:
    """A source that counts how often it is asked for the names of its parts."""

    def __init__(self, source):
        self.source = source
        self.asked = 0

    @property
    def parts(self):
        self.asked += 1
        return self.source.parts

    def __getattr__(self, name):
        return getattr(self.source, name)


def test_the_names_of_the_parts_are_asked_for_as_often_for_many_as_for_few(discs, vqgan, tmp_path):
    few, many = Counted(open_source(discs, 15)), Counted(open_source(discs, 2))
    preprocess(few, tmp_path / "few", vqgan)
    preprocess(many, tmp_path / "many", vqgan)
    assert few.asked == many.asked


def test_shares_of_the_parts_come_to_the_whole_whoever_is_last(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 4), tmp_path / "alone", vqgan)
    for number in (2, 3):
        assert preprocess(open_source(discs, 4), tmp_path / "out", vqgan, share=(number, 3)) is None
    with pytest.raises(ValueError, match="3 of 8 parts are not made yet: 00000, 00003, 00006"):
        preprocess(open_source(discs, 4), tmp_path / "out", vqgan, make=make_nothing)
    info = preprocess(open_source(discs, 4), tmp_path / "out", vqgan, share=(1, 3))
    assert info.counts.seen == 30
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_machine_without_gpus_gathers_what_gpus_made(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="4 of 4 parts are not made yet"):
        preprocess(open_source(discs, 8), out, vqgan, make=make_nothing)
    assert not out.exists()
    preprocess(open_source(discs, 8), tmp_path / "alone", vqgan, bf16=True)
    with monkeypatch.context() as patch:
        patch.setattr(encode, "gather", lambda job, vqgan, settings: None)  # the last files are seen late
        assert preprocess(open_source(discs, 8), out, vqgan, bf16=True) is None
    with pytest.raises(ValueError, match="crops was 1, now 2"):
        preprocess(open_source(discs, 8), out, vqgan, crops=2, make=make_nothing)
    for _ in range(2):
        preprocess(open_source(discs, 8), out, vqgan, make=make_nothing)
        assert contents(out) == contents(tmp_path / "alone")


@pytest.mark.parametrize("seconds_later", [False, True])
def test_two_that_gather_at_the_same_moment_agree(discs, vqgan, tmp_path, monkeypatch, seconds_later):
    """The other one has written dataset.json, and perhaps removed the notes, when this one begins to add up."""
    preprocess(open_source(discs, 8), tmp_path / "alone", vqgan)
    gather = progress.gather

    def gather_second(out, names):
        monkeypatch.setattr(progress, "gather", gather)
        notes = contents(out / ".progress")
        preprocess(open_source(discs, 8), out, vqgan)
        for name, note in () if seconds_later else notes.items():
            (out / ".progress").mkdir(exist_ok=True)
            (out / ".progress" / name).write_bytes(note)
        return gather(out, names)

    monkeypatch.setattr(progress, "gather", gather_second)
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    assert info.counts.seen == 30
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_machines_that_begin_together_agree_on_one_set_of_settings(tmp_path):
    with ThreadPoolExecutor(8) as machines:
        begun = [machines.submit(progress.begin, tmp_path, {"side": number % 2}) for number in range(8)]
    stays = json.loads((tmp_path / ".progress" / "settings.json").read_text())["side"]
    assert [begin.exception() is None for begin in begun] == [number % 2 == stays for number in range(8)]


def test_one_that_begins_while_another_tidies_up_takes_the_whole(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert preprocess(open_source(discs, 8), out, vqgan, share=(1, 4)) is None
    read_json = progress.read_json

    def read_late(path):
        monkeypatch.setattr(progress, "read_json", read_json)
        preprocess(open_source(discs, 8), out, vqgan)
        return read_json(path)

    monkeypatch.setattr(progress, "read_json", read_late)
    assert preprocess(open_source(discs, 8), out, vqgan) == read_dataset_info(out)
    assert not (out / ".progress").exists()


def test_notes_that_were_half_removed_are_not_taken_for_those_of_another_run(discs, vqgan, tmp_path, monkeypatch):
    out = tmp_path / "out"
    rmtree = shutil.rmtree

    def killed(folder, **options):
        (Path(folder) / "settings.json").unlink()
        raise Stop

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Stop):
        preprocess(open_source(discs, 8), out, vqgan, rules=Rules(min_side=1000))
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert preprocess(open_source(discs, 8), out, vqgan).counts.kept == 30
    assert not list(out.glob(".*"))


def test_only_what_this_program_left_is_tidied_up(tmp_path):
    for name in ("shard-00001.parquet", "dataset.json", "rejected.jsonl", "notes.txt"):
        (tmp_path / f".{name}.abc.tmp").touch()
    (tmp_path / ".mine.tmp").touch()
    progress.remove_leftovers(tmp_path)
    assert {*contents(tmp_path)} == {".mine.tmp", ".notes.txt.abc.tmp"}


class SometimesAway(ListedFolder):
    """A storage that fails in the middle of part 1."""

    def samples(self, part):
        for number, sample in enumerate(super().samples(part)):
            if (part, number) == (1, 5):
                raise OSError("the storage is away")
            yield sample


def test_a_part_that_cannot_be_read_is_named_and_made_later(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 8), tmp_path / "alone", vqgan, batch_size=4)
    with pytest.raises(OSError, match=r"could not be read.*00001: the storage is away"):
        preprocess(SometimesAway(discs, 8), tmp_path / "out", vqgan, batch_size=4)
    assert len(list((tmp_path / "out").glob("shard-*.parquet"))) == 3
    preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


class OfUnknownSize(ListedFolder):
    def size(self, part):
        return None


def test_progress_guesses_the_total_where_sizes_are_unknown(discs):
    steps = []
    report = Reporter(OfUnknownSize(discs, 8), [0, 1, 2], lambda *step: steps.append(step))
    report(0, 4, False)
    report(0, 6, True)
    report(1, 2, False)
    assert steps == [(4, 12, "0 of 3 parts"), (6, 18, "1 of 3 parts"), (8, 18, "1 of 3 parts")]


def test_progress_counts_the_pictures_of_this_run(discs, vqgan, tmp_path):
    (discs / "029.png").unlink()
    steps = []
    preprocess(
        open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4, on_progress=lambda *step: steps.append(step)
    )
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][:2] == (30, 30)
    preprocess(
        open_source(discs, 8),
        tmp_path / "out",
        vqgan,
        batch_size=4,
        on_progress=lambda *step: pytest.fail("work was repeated"),
    )


class Stop(BaseException):
    """Ends a run from inside, as Ctrl+C does."""


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_an_interrupted_run_ends_in_the_same_bytes(discs, vqgan, tmp_path, stop_at):
    preprocess(open_source(discs, 8), tmp_path / "undisturbed", vqgan, batch_size=4)
    calls = 0

    def stop(done: int, total: int, note: str) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stop

    with pytest.raises(Stop):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4, on_progress=stop)
    assert not (tmp_path / "out" / "dataset.json").exists()
    preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_killed_run_continues_where_it_stopped(emoji, vqgan_folder, tmp_path):
    command = ["preprocess", emoji, "OUT", "--vqgan", vqgan_folder, "--shard-rows", 8, "--device", "cpu"]

    def arguments(out: str) -> list[str]:
        return [str(tmp_path / out) if word == "OUT" else str(word) for word in command]

    assert run_command(*arguments("undisturbed")) == 0

    out = tmp_path / "out"
    program = [sys.executable, "-c", "from dalle_lean.cli import main; main()", *arguments("out")]
    with subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while not (out / ".progress" / "part-00003.json").exists():
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (out / "dataset.json").exists()
    noted = [out / f"shard-{note.stem.removeprefix('part-')}.parquet" for note in out.glob(".progress/part-*.json")]
    finished = {path: os.stat(path).st_mtime_ns for path in noted}
    (out / ".shard-00009.parquet.abc.tmp").write_bytes(b"half a shard")

    assert run_command(*arguments("out")) == 0
    assert {path: os.stat(path).st_mtime_ns for path in finished} == finished
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_shard_without_its_note_or_a_note_without_its_shard_is_made_again(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 8), tmp_path / "undisturbed", vqgan)

    def stop(done: int, total: int, note: str) -> None:
        if done > 24:
            raise Stop

    with pytest.raises(Stop):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, on_progress=stop)
    (tmp_path / "out" / ".progress" / "part-00001.json").unlink()
    (tmp_path / "out" / "shard-00002.parquet").unlink()
    preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_in_the_same_folder_are_refused(discs, vqgan, tmp_path, finished):
    def stop(done: int, total: int, note: str) -> None:
        if not finished and done > 8:
            raise Stop

    with suppress(Stop):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, on_progress=stop)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="picture_side was 16, now 24"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, picture_side=24)
    with pytest.raises(ValueError, match="shard_rows was 8, now 9"):
        preprocess(open_source(discs, 9), tmp_path / "out", vqgan)
    with pytest.raises(ValueError, match="precision was float32, now bfloat16"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, bf16=True)
    add_lines(discs, {"file_name": "000.png", "text": "one more"})
    with pytest.raises(ValueError, match="source was"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    assert contents(tmp_path / "out") == before


@pytest.fixture
def tars(discs, tmp_path):
    """A tar as img2dataset leaves it, with the number of its pictures beside it."""
    folder = tmp_path / "tars"
    folder.mkdir()
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for number in range(3):
            tar.add(discs / f"{number:03d}.png", f"{number}.png")
            (tmp_path / "caption.txt").write_text(f"disc number {number}")
            tar.add(tmp_path / "caption.txt", f"{number}.txt")
    (folder / "00000_stats.json").write_text('{"successes": 3}')
    return folder


def test_what_is_only_noted_beside_a_source_is_no_setting(tars, vqgan, tmp_path):
    info = preprocess(open_source(tars, 8), tmp_path / "out", vqgan)
    (tars / "00000_stats.json").unlink()
    assert preprocess(open_source(tars, 8), tmp_path / "out", vqgan) == info


def test_a_folder_of_an_earlier_version_is_still_known(tars, vqgan, tmp_path):
    info = preprocess(open_source(tars, 8), tmp_path / "out", vqgan)
    content = json.loads((tmp_path / "out" / "dataset.json").read_text())
    content["settings"]["shard_rows"] = 3
    (tmp_path / "out" / "dataset.json").write_text(json.dumps(content))
    assert preprocess(open_source(tars, 8), tmp_path / "out", vqgan).shards == info.shards


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_a_version_with_two_layouts_continues_where_it_wrote_the_published_one(
    discs, vqgan, tmp_path, finished
):
    out = tmp_path / "out"
    preprocess(open_source(discs, 8), tmp_path / "undisturbed", vqgan)
    preprocess(open_source(discs, 8), out, vqgan, share=(1, 1 if finished else 2))
    path = out / ("dataset.json" if finished else ".progress/settings.json")
    noted = json.loads(path.read_text())
    settings = noted["settings"] if finished else noted
    settings["layout"] = "packed"
    path.write_text(json.dumps(noted))
    with pytest.raises(ValueError, match="of the packed layout, which this version no longer reads"):
        preprocess(open_source(discs, 8), out, vqgan)
    settings["layout"] = "published"
    path.write_text(json.dumps(noted))
    shards = preprocess(open_source(discs, 8), out, vqgan).shards
    assert shards == read_dataset_info(tmp_path / "undisturbed").shards


def test_a_source_without_parts_is_refused(vqgan, tmp_path):
    with pytest.raises(ValueError, match="the source has no parts"):
        preprocess(TarShards([]), tmp_path / "out", vqgan)
    assert not (tmp_path / "out").exists()


def test_shards_of_unknown_origin_are_not_overwritten(discs, vqgan, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-00000.parquet").write_bytes(b"precious")
    with pytest.raises(ValueError, match="unknown origin"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    assert contents(tmp_path / "out") == {"shard-00000.parquet": b"precious"}


def test_nothing_usable_is_a_mistake_and_the_mended_source_works(discs, vqgan_folder, tmp_path, capfd):
    pictures = {path: path.read_bytes() for path in discs.glob("*.png")}
    for path in pictures:
        path.write_bytes(b"no picture")
    command = ("preprocess", discs, tmp_path / "out", "--vqgan", vqgan_folder, "--device", "cpu")
    assert run_command(*command) == 2
    errors = capfd.readouterr().err
    assert "no picture of the source can be used (picture_broken 30)" in errors
    assert "Traceback" not in errors
    for path, picture in pictures.items():
        path.write_bytes(picture)
    add_lines(discs, {"file_name": "000.png", "text": "one more"})
    assert run_command(*command) == 0
    assert "31 pictures in" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--picture-side", "20"), "picture_side=20: must be a positive multiple of 8"),
        (("--picture-side", "8200"), "picture_side=8200: must be at most 8192 pixels"),
        (("--batch-size", "0"), "batch_size=0: must be positive"),
        (("--workers", "-1"), "workers=-1: must be positive"),
        (("--crops", "0"), "crops=0: must be positive"),
        (("--max-memory", "1"), "memory_bytes=1048576: must be at least"),
        (("--part", "0/3"), "part='0/3': must be I/N with I from 1 to N"),
        (("--part", "2"), "part='2': must be I/N with I from 1 to N"),
        (("--shard-rows", "0"), "part_rows=0: must be positive"),
        (("--device", "tpu"), "device='tpu': it must be auto, cpu, cuda or cuda:N"),
        (("--vqgan", "nowhere"), "nowhere"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_two(discs, vqgan_folder, tmp_path, capfd, options, message):
    assert run_command("preprocess", discs, tmp_path / "out", "--vqgan", vqgan_folder, *options) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_bfloat16_changes_few_codes(discs, vqgan, tmp_path):
    codes = []
    for bf16 in (False, True):
        info = preprocess(open_source(discs, 8), tmp_path / str(bf16), vqgan, bf16=bf16)
        codes.append(np.stack([row["codes"] for row in open_stream(tmp_path / str(bf16))]))
    assert info.settings["precision"] == "bfloat16"
    assert (codes[0] == codes[1]).mean() > 0.8
