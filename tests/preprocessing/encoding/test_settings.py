"""Settings: a folder keeps those it was begun with, and what cannot be right is refused."""

import dataclasses
import tarfile
from contextlib import suppress

import pytest

from dalle_lean.errors import UserError
from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.filters import Rules
from preprocessing.encoding.part_records import begin
from preprocessing.encoding.pipeline import shard_name
from preprocessing.shards.manifest import (
    NAME,
    SHARD_BYTES,
    Counts,
    DatasetInfo,
    Shard,
    check_room,
    write_dataset_info,
)
from preprocessing.sources import open_source
from preprocessing.sources.files import part_names
from preprocessing.sources.tar import TarShards
from tests.preprocessing.runs import Stop, add_lines, contents, run_command

pytestmark = pytest.mark.usefixtures("decode_here")


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_in_the_same_folder_are_refused(discs, vqgan, tmp_path, finished):
    def stop(done: int, total: int, note: str) -> None:
        if not finished and done > 8:
            raise Stop

    with suppress(Stop):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, on_progress=stop)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="--picture-side was 16, now 24"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, picture_side=24)
    with pytest.raises(
        ValueError, match=r"\(--shard-rows was 8, now 9\): use its settings, choose another folder, or remove it"
    ):
        preprocess(open_source(discs, 9), tmp_path / "out", vqgan)
    with pytest.raises(ValueError, match="--bf16 was off, now on"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, bf16=True)
    rules = Rules(allowed_nsfw=None, max_aspect_ratio=None, max_hash_distance=6)
    words = (
        "--allowed-nsfw was UNLIKELY, now any; --max-aspect-ratio was 2.0, now off; --max-hash-distance was off, now 6;"
    )
    with pytest.raises(ValueError, match=f"{words} --max-memory was 1024, now 512"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, rules=rules, memory_bytes=2**29)
    add_lines(discs, {"file_name": "000.png", "text": "one more"})
    for shard_rows in (8, 9):
        with pytest.raises(
            ValueError,
            match=r"\(pictures or captions were added, removed or changed since, or this is another source\): choose",
        ):
            preprocess(open_source(discs, shard_rows), tmp_path / "out", vqgan)
    assert contents(tmp_path / "out") == before


def test_a_picture_added_to_a_folder_of_one_shard_is_said_in_words(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 4096), tmp_path / "out", vqgan)
    add_lines(discs, {"file_name": "000.png", "text": "one more"})
    with pytest.raises(UserError, match=r"other settings \(pictures or captions were added, [^;]*\): choose another"):
        preprocess(open_source(discs, 4096), tmp_path / "out", vqgan)


def test_shards_made_in_another_way_are_not_gone_on_with(discs, vqgan, tmp_path):
    info = preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    for settings in ({"mixed": {"runs/a": 2}}, {**info.settings, "deduped": 1}):
        write_dataset_info(tmp_path / "out", dataclasses.replace(info, settings=settings))
        with pytest.raises(UserError, match="made of other shards or by another program: choose another folder"):
            preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    begin(tmp_path / "deduped", {**info.settings, "deduped": "a" * 64})
    with pytest.raises(UserError, match="made of other shards"):
        begin(tmp_path / "deduped", {**info.settings, "deduped": "b" * 64})


@pytest.mark.parametrize("finished", [True, False])
def test_reasons_are_kept_from_the_beginning_or_not_at_all(discs, vqgan, tmp_path, finished):
    (discs / "003.png").write_bytes(b"no picture")
    share = (1, 1) if finished else (1, 2)
    preprocess(open_source(discs, 8), tmp_path / "without", vqgan, share=share)
    with pytest.raises(UserError, match="was begun without --explain, so no reasons were kept: leave it out, choose"):
        preprocess(open_source(discs, 8), tmp_path / "without", vqgan, explain=True)
    preprocess(open_source(discs, 8), tmp_path / "with", vqgan, share=share, explain=True)
    preprocess(open_source(discs, 8), tmp_path / "with", vqgan)
    assert "003.png" in (tmp_path / "with/rejected.jsonl").read_text()


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


def test_a_source_of_more_parts_than_a_folder_can_list_is_refused(vqgan, tmp_path):
    with pytest.raises(UserError, match=r"dataset.json has room for the first 41\d,\d{3} of these shards only"):
        preprocess(TarShards([f"{number:06d}.tar" for number in range(450_000)]), tmp_path / "out", vqgan)
    assert not (tmp_path / "out").exists()


def test_dataset_json_has_room_for_all_that_is_not_refused(tmp_path):
    long = [shard_name(name) for name in part_names([f"{'x' * 200}.tar"] * 1000)]
    for names in ([shard_name(f"{number:06d}") for number in range(1000)], long, [f"00-0000-é{name}" for name in long]):
        sizes = []
        for listed in ([], names):
            shards = tuple(Shard(file=name, rows=10**10 - 1, sha256="a" * 64) for name in listed)
            rest = {"vqgan": "a" * 64, "image_side": 2, "codebook_size": 64, "picture_side": 16, "counts": Counts()}
            write_dataset_info(tmp_path, DatasetInfo(**rest, shards=shards))
            sizes.append((tmp_path / NAME).stat().st_size)
        allowed = sum(SHARD_BYTES + len(name.encode()) for name in names)
        assert sizes[1] == sizes[0] + allowed + len("\n  ") - len(",")


def test_longer_names_leave_room_for_fewer_shards():
    check_room(f"shard-{number}.parquet" for number in range(400_000))
    with pytest.raises(UserError, match=r"the first 2\d\d,\d{3} of these"):
        check_room("x" * 130 for _ in range(400_000))


@pytest.mark.parametrize("share", [(0, 2), (3, 2), (1, 0)])
def test_a_share_that_no_machine_has_is_refused(discs, vqgan, tmp_path, share):
    with pytest.raises(UserError, match=r"must be \(i, n\) with i from 1 to n"):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, share=share)
    assert not (tmp_path / "out").exists()


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
