"""A local Ray of two workers; needs the extra `ray`."""

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.work_queue import WorkersDie
from preprocessing.sources import open_source
from tests.preprocessing.processes import descendants, wait_for

ray = pytest.importorskip("ray")

from preprocessing.encoding.cluster import make_on_ray  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, num_gpus=0, log_to_driver=False, logging_level="error", include_dashboard=False)
    yield
    ray.shutdown()


def actors() -> list[int]:
    """Processes of Ray that encode at the moment."""
    names = {pid: (Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in descendants()}
    return [pid for pid, name in names.items() if name.startswith(b"ray::MapWorker(MapBatches(EncodingActor)).submit")]


def test_two_workers_come_to_the_same_as_one_process(emoji, vqgan, tmp_path):
    source = open_source(emoji, 8)
    preprocess(source, tmp_path / "alone", vqgan, explain=True)
    steps = []
    info = preprocess(
        source,
        tmp_path / "out",
        vqgan,
        explain=True,
        make=partial(make_on_ray, workers=2),
        on_progress=lambda *step: steps.append(step),
    )
    assert info.counts.seen == 200
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert steps[-1] == (200, 200, "25 of 25 parts")


def test_a_killed_worker_is_replaced_and_nothing_is_lost(emoji, vqgan, tmp_path):
    source = open_source(emoji, 4)
    preprocess(source, tmp_path / "alone", vqgan)
    killed = []

    def kill_one():
        wait_for(lambda: list((tmp_path / "out").glob(".progress/part-*.json")))
        killed.append(wait_for(actors)[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    preprocess(source, tmp_path / "out", vqgan, make=partial(make_on_ray, workers=2))
    killer.join()
    assert killed
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def misbehaving(emoji, samples):
    """A source of 10 parts of which `samples` says what becomes of the fourth."""
    source = open_source(emoji, 20)

    class Misbehaving(type(source)):
        def samples(self, part):
            return samples() if part == 3 else super().samples(part)

    source.__class__ = Misbehaving
    return source


@pytest.mark.parametrize(
    ("error", "parts_made"), [(OSError("the storage is away"), range(9, 10)), (TypeError("a mistake"), range(10))]
)
def test_what_goes_wrong_is_told_as_it_is_and_storages_that_fail_stop_no_other_part(
    emoji, vqgan, tmp_path, error, parts_made
):
    def samples():
        raise error

    with pytest.raises(type(error), match=str(error)):
        preprocess(misbehaving(emoji, samples), tmp_path / "out", vqgan, make=partial(make_on_ray, workers=2))
    assert len(list((tmp_path / "out").glob("shard-*.parquet"))) in parts_made


def test_a_part_that_ends_every_worker_ends_the_run(emoji, vqgan, tmp_path):
    def samples():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkersDie, match=r"3 processes that encode have died at parts \d to \d of the source"):
        preprocess(misbehaving(emoji, samples), tmp_path / "out", vqgan, make=partial(make_on_ray, workers=2))
