"""A Ray cluster of two nodes on this machine; needs the extra `ray`."""

import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from preprocessing.encoding.encode import preprocess
from preprocessing.encoding.ray_data import MAX_RUN, cpus_of_actor, make_on_devices, make_on_ray, only_gpus, runs
from preprocessing.sources import open_source
from tests.preprocessing.processes import ray_actors, wait_for
from tests.preprocessing.runs import contents

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.timeout(600)
NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "no_monitor": True})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def second_node(cluster):
    """The cluster's other node, which a test may kill."""
    node = cluster.add_node(**NODE)
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)


@contextmanager
def once_made(out: Path, parts: int, kill):
    """Call `kill` from another thread as soon as so many parts are made."""
    killed = []

    def wait_and_kill():
        wait_for(lambda: len(list(out.glob(".progress/part-*.json"))) >= parts, timeout_s=400)
        killed.append(kill())

    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    yield
    killer.join()
    assert killed


@slow
def test_a_killed_node_changes_no_byte(cluster, second_node, emoji, vqgan, tmp_path):
    source = open_source(emoji, 8)
    preprocess(source, tmp_path / "alone", vqgan, explain=True)
    steps = []

    def kill() -> None:
        assert len(ray_actors()) == 2
        cluster.remove_node(second_node, allow_graceful=False)

    with once_made(tmp_path / "out", 1, kill):
        info = preprocess(
            source,
            tmp_path / "out",
            vqgan,
            explain=True,
            make=make_on_ray,
            on_progress=lambda *step: steps.append(step),
        )
    wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
    assert info.counts.seen == 200
    assert steps[-1] == (200, 200, "25 of 25 shards")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@slow
def test_a_killed_actor_is_replaced_and_nothing_is_lost(second_node, emoji, vqgan, tmp_path):
    source = open_source(emoji, 8)
    preprocess(source, tmp_path / "alone", vqgan)
    with once_made(tmp_path / "out", 1, lambda: os.kill(wait_for(ray_actors)[0], signal.SIGKILL)):
        preprocess(source, tmp_path / "out", vqgan, make=partial(make_on_ray, workers=2))
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@slow
def test_ray_goes_on_for_a_caller_that_started_it(cluster, emoji, vqgan, tmp_path):
    make = partial(make_on_devices, devices=[torch.device("cpu")])
    preprocess(open_source(emoji, 50), tmp_path / "out", vqgan, make=make)
    assert ray.is_initialized()


def misbehaving(emoji, samples):
    """A source of 10 parts of which `samples` says what becomes of the fourth."""
    source = open_source(emoji, 20)

    class Misbehaving(type(source)):
        def samples(self, part):
            return samples() if part == 3 else super().samples(part)

    source.__class__ = Misbehaving
    return source


@slow
@pytest.mark.parametrize(
    ("error", "parts_made"), [(OSError("the storage is away"), range(9, 10)), (TypeError("a mistake"), range(10))]
)
def test_what_goes_wrong_is_told_as_it_is_and_storages_that_fail_stop_no_other_part(
    second_node, emoji, vqgan, tmp_path, error, parts_made
):
    def samples():
        raise error

    with pytest.raises(type(error), match=str(error)):
        preprocess(misbehaving(emoji, samples), tmp_path / "out", vqgan, make=partial(make_on_ray, workers=2))
    assert len(list((tmp_path / "out").glob("shard-*.parquet"))) in parts_made


@slow
def test_a_part_that_ends_every_worker_ends_the_run(second_node, emoji, vqgan, tmp_path):
    def samples():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(OSError, match=r"3 processes that encode have died at parts \d to \d of the source"):
        preprocess(misbehaving(emoji, samples), tmp_path / "out", vqgan, make=partial(make_on_ray, workers=2))


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (25, 2), (1000, 4), (3, 8)])
def test_runs_hold_every_part_once_and_the_last_is_one_part(count, workers):
    found = list(runs(range(count), workers))
    assert [part for run in found for part in run] == list(range(count))
    lengths = [len(run) for run in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] <= MAX_RUN
    assert lengths[-1] == 1
    assert all(sum(lengths[place:]) >= workers * length for place, length in enumerate(lengths) if length > 1)


@pytest.mark.parametrize(
    ("cpus", "workers", "each"),
    [([8], 1, 8), ([8], 3, 2), ([4, 4], 2, 4), ([4, 4], 1, 4), ([8, 2], 2, 2), ([1, 0], 4, 1)],
)
def test_an_actor_fits_on_every_machine(cpus, workers, each):
    assert cpus_of_actor(cpus, workers) == each


@pytest.mark.parametrize(("before", "inside"), [(None, "1,2"), ("4,5,7", "5,7")])
def test_chosen_gpus_are_counted_among_the_visible_ones(monkeypatch, before, inside):
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    with only_gpus([1, 2]):
        assert os.environ[name] == inside
    assert os.environ.get(name) == before
