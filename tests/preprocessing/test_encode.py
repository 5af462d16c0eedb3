import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dalle_lean import cli
from dalle_lean.files import sha256_file
from preprocessing.encode import preprocess
from preprocessing.shards import open_stream, read_dataset_info
from preprocessing.sources import open_source

ROOT = Path(__file__).parents[2]


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


def test_the_number_of_workers_changes_nothing(discs, vqgan, tmp_path):
    for workers in (1, 4):
        preprocess(open_source(discs, 8), tmp_path / str(workers), vqgan, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "4")


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
    finished = {path: os.stat(path).st_mtime_ns for path in sorted(out.glob("shard-*.parquet"))[:4]}
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
        (("--batch-size", "0"), "batch_size=0: must be positive"),
        (("--workers", "-1"), "workers=-1: must be positive"),
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
