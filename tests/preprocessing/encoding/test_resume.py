"""A run that was interrupted or could not read its source continues, to the same bytes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preprocessing.encoding.encode import preprocess
from preprocessing.sources import open_source
from preprocessing.sources.folder import ListedFolder
from tests.preprocessing.runs import Stop, contents, run_command

ROOT = Path(__file__).parents[3]


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
