"""Real processes, killed at any moment: nothing is lost, nothing is there twice, and the bytes are the same."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.filters import Rules
from preprocessing.sources import open_source
from tests.children import PROGRAM, start
from tests.preprocessing.processes import descendants, is_alive, ray_actors, wait_for
from tests.preprocessing.runs import contents

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def undisturbed(emoji, vqgan, tmp_path_factory):
    """What a run leaves that nobody touches."""
    out = tmp_path_factory.mktemp("undisturbed")
    rules = Rules(min_caption_length=12, max_hash_distance=20)
    info = preprocess(open_source(emoji, 8), out, vqgan, batch_size=5, flip=True, explain=True, rules=rules)
    assert info.counts.rejected["duplicate"] > 3
    return contents(out)


@pytest.fixture
def begin(emoji, vqgan_folder, tmp_path):
    """Starts the command on tmp_path / "out"; what still runs when the test ends is killed."""
    running = []

    def begin(*options: str) -> subprocess.Popen[str]:
        command = ["preprocess", str(emoji), str(tmp_path / "out"), "--vqgan", str(vqgan_folder), "--shard-rows", "8"]
        command += ["--batch-size", "5", "--flip", "--explain", "--max-hash-distance", "20"]
        command += ["--min-caption-length", "12", "--workers", "2", "--device", "cpu", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(start([*PROGRAM, *command], cwd=ROOT, **pipes))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def notes(out: Path) -> int:
    return len(list((out / ".progress").glob("part-*.json")))


@pytest.mark.long
@pytest.mark.parametrize("made", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_as_a_whole_it_continues_where_it_stopped_and_orphans_go(begin, undisturbed, tmp_path, made):
    process, out = begin(), tmp_path / "out"
    workers = wait_for(lambda: descendants(process.pid))
    wait_for(lambda: out.is_dir() and notes(out) >= made)
    workers += descendants(process.pid)
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in workers))
    assert not (out / "dataset.json").exists()
    finished = [out / f"shard-{note.stem.removeprefix('part-')}.parquet" for note in out.glob(".progress/part-*.json")]
    written = {path: path.stat().st_mtime_ns for path in finished}
    (out / ".shard-00009.parquet.abc.tmp").write_bytes(b"half a shard")
    finish(begin())
    assert {path: path.stat().st_mtime_ns for path in finished} == written
    assert contents(out) == undisturbed


@pytest.mark.long
def test_killed_decoders_are_replaced_and_nothing_is_lost(begin, undisturbed, tmp_path):
    process = begin()
    killed: set[int] = set()
    for _ in range(2):
        workers = wait_for(lambda before=killed: len(alive := {*descendants(process.pid)} - before) == 2 and alive)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        killed = killed | workers
    finish(process)
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_a_killed_device_is_replaced_and_its_parts_are_made_again(begin, undisturbed, tmp_path):
    process = begin("--device", "cpu,cpu")
    wait_for(lambda: notes(tmp_path / "out") >= 2)
    victim = ray_actors(process.pid)[0]
    orphans = descendants(victim)
    os.kill(victim, signal.SIGKILL)
    finish(process)
    assert contents(tmp_path / "out") == undisturbed
    assert not any(is_alive(pid) for pid in orphans)


@pytest.mark.slow
def test_with_several_devices_a_kill_of_everything_loses_nothing(begin, undisturbed, tmp_path):
    process = begin("--device", "cpu,cpu")
    wait_for(lambda: notes(tmp_path / "out") >= 3)
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    finish(begin("--device", "cpu,cpu"))
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_ctrl_c_ends_cleanly_and_keeps_what_is_finished(begin, undisturbed, tmp_path, device):
    process = begin("--device", device)
    wait_for(lambda: notes(tmp_path / "out") >= 2)
    workers = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    wait_for(lambda: not any(is_alive(pid) for pid in workers))
    assert notes(tmp_path / "out") >= 2
    finish(begin("--device", device))
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("options", [(("--part", "1/2"), ("--part", "2/2")), ((), ())])
def test_machines_that_share_a_folder_come_to_the_same_as_one(begin, undisturbed, tmp_path, options):
    machines = [begin(*option) for option in options]
    for machine in machines:
        finish(machine)
    assert contents(tmp_path / "out") == undisturbed
