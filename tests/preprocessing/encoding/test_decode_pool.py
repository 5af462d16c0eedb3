"""Decoding in worker processes."""

import os
import pickle
import shutil
import signal
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from preprocessing.encoding.decode_pool import GROUP_BYTES, GROUP_SIZE, DecodePool, groups
from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.sources import Sample
from tests.preprocessing.deadly import Deadly, Trap
from tests.preprocessing.processes import peak_bytes, wait_for, worker_processes
from tests.preprocessing.shards_of_pictures import encoded

MIB = 2**20


def sample(key: str, picture: bytes | None = None) -> Sample:
    return Sample(
        key=key, caption="a picture", picture=encoded(Image.new("RGB", (9, 8))) if picture is None else picture
    )


def outcome(result: Candidate | Rejection) -> str:
    return result.reason if isinstance(result, Rejection) else "kept"


def plain(result: Candidate | Rejection) -> tuple:
    return tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in vars(result).values())


@pytest.fixture(autouse=True)
def _workers_find_these_tests(monkeypatch):
    """Before a package `tests` that something else has installed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


@pytest.fixture
def new_processes():
    """Tells the worker processes that a test has started. Ray, left by another test, starts its own at any time."""
    before = set(worker_processes())
    return lambda: set(worker_processes()) - before


def test_processes_decode_as_one_call_does_and_keep_the_order(emoji, new_processes):
    decoding = Decoding(side=16, crops=3, flip=True)
    samples = [sample(path.name, path.read_bytes()) for path in sorted(emoji.glob("*.png"))[:40]]
    samples[7] = sample("text", b"no picture")
    samples[11] = Sample(key="mute", picture=samples[0].picture)
    with DecodePool(decoding, workers=3) as pool:
        results = list(pool.map(["begin", *samples, "end"]))
    assert results[0] == "begin"
    assert results[-1] == "end"
    assert [plain(result) for result in results[1:-1]] == [plain(decoding(one)) for one in samples]
    wait_for(lambda: not new_processes(), timeout_s=10)


def test_groups_end_where_they_are_full_or_large_or_something_else_stands():
    small, large = [sample(f"{number}", b"x") for number in range(7)], sample("large", b"x" * (GROUP_BYTES + 1))
    items = [*small[:3], "mark", *small[3:5], large, *small[5:], "end"]
    shown = [[one.key for one in item] if isinstance(item, list) else item for item in groups(items, size=2)]
    assert shown == [["0", "1"], ["2"], "mark", ["3", "4"], ["large"], ["5", "6"], "end"]


def test_samples_without_a_picture_stay_before_what_follows_them():
    empty = Sample(key="empty", problem="file_missing")
    shown = list(groups(["begin", empty, empty, "end", "begin", empty], size=8))
    assert shown == ["begin", [empty, empty], "end", "begin", [empty]]


def test_large_answers_come_one_by_one():
    with DecodePool(Decoding(side=1024), workers=1) as pool:
        assert pool.group_size == 1


def test_a_group_loses_only_the_pictures_that_are_to_blame():
    keys = ["deadly" if number % 3 == 1 else f"{number}" for number in range(GROUP_SIZE)]
    with DecodePool(Deadly(side=8), workers=1) as pool:
        results = pool.decode([sample(key) for key in keys])
    assert [outcome(result) for result in results] == ["decoder_died" if key == "deadly" else "kept" for key in keys]


def test_a_picture_that_ends_its_worker_is_counted_and_the_others_are_kept():
    keys = [f"{number}" for number in range(12)]
    keys[3] = keys[4] = "deadly"
    with DecodePool(Deadly(side=8), workers=2) as pool:
        results = list(pool.map([sample(key) for key in keys]))
    assert [outcome(result) for result in results] == ["kept"] * 3 + ["decoder_died"] * 2 + ["kept"] * 7
    assert results[3].detail == "signal 11"


def test_a_picture_that_never_ends_is_counted():
    with DecodePool(Deadly(side=8), workers=1, cpu_limit_s=0.3) as pool:
        results = list(pool.map([sample("endless"), sample("after")]))
    assert [outcome(result) for result in results] == ["decoder_died", "kept"]


def test_a_picture_that_takes_its_worker_over_is_counted_and_nothing_it_says_is_run(tmp_path):
    trace = tmp_path / "unpickled"
    keys = ["before", f"trap-{trace}", "between", "flood", "after"]
    with DecodePool(Deadly(side=8), workers=1) as pool:
        results = list(pool.map([sample(key) for key in keys]))
    assert [outcome(result) for result in results] == ["kept", "decoder_died", "kept", "decoder_died", "kept"]
    assert results[1].detail.startswith("a wrong answer")
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(str(trace))))
    assert trace.exists()


def test_a_worker_killed_by_chance_loses_nothing(tmp_path):
    keys = [f"unlucky-{tmp_path / str(number)}" for number in range(4)]
    with DecodePool(Deadly(side=8), workers=2) as pool:
        assert [outcome(result) for result in pool.map([sample(key) for key in keys])] == ["kept"] * 4
    assert len(list(tmp_path.iterdir())) == 4


def test_idle_workers_that_were_killed_are_replaced(new_processes):
    with DecodePool(Decoding(side=8), workers=2) as pool:
        for _ in range(3):
            assert [outcome(result) for result in pool.map([sample(f"{n}") for n in range(6)])] == ["kept"] * 6
            for pid in new_processes():
                os.kill(pid, signal.SIGKILL)


def test_no_worker_takes_more_memory_than_the_cap(new_processes):
    bomb = encoded(Image.new("RGBA", (6000, 6000)), compress_level=1)
    assert len(bomb) < 2 * MIB
    with DecodePool(Decoding(side=8), workers=1, memory_bytes=128 * MIB) as pool:
        results, peaks = [], []
        for result in pool.map([sample("before"), sample("bomb", bomb), sample("after")]):
            results.append(outcome(result))
            peaks += [peak_bytes(pid) for pid in new_processes()]
        assert results == ["kept", "too_much_memory", "kept"]
        assert max(peaks) < 128 * MIB + 60 * MIB  # an idle one has 30 to 40 MiB in memory
    with DecodePool(Decoding(side=8), workers=1, memory_bytes=2048 * MIB) as pool:
        assert [outcome(result) for result in pool.map([sample("bomb", bomb)])] == ["kept"]


def test_only_so_many_bytes_are_read_ahead():
    taken = 0

    def samples():
        nonlocal taken
        for number in range(40):
            taken += 1
            yield sample(f"{number}", b"x" * (40 * MIB))

    with DecodePool(Decoding(side=8), workers=4) as pool:
        results = pool.map(samples())
        next(results)
        assert taken <= 8


def test_a_worker_that_cannot_start_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with (
        DecodePool(Decoding(side=8), workers=1) as pool,
        pytest.raises(OSError, match="no worker process can be started"),
    ):
        list(pool.map([sample("one")]))


def test_a_worker_that_cannot_import_its_decoding_says_so(monkeypatch):
    class Elsewhere(Decoding):
        pass

    Elsewhere.__module__, Elsewhere.__qualname__ = "only_in_this_process", "Elsewhere"
    monkeypatch.setitem(sys.modules, "only_in_this_process", SimpleNamespace(Elsewhere=Elsewhere))
    with (
        DecodePool(Elsewhere(side=8), workers=1) as pool,
        pytest.raises(OSError, match=r"no worker process .* No module named 'only_in_this_process'"),
    ):
        list(pool.map([sample("one")]))


def test_an_interrupted_pool_leaves_no_process(new_processes):
    def interrupted():
        with DecodePool(Decoding(side=8), workers=2) as pool:
            for _ in pool.map(sample(f"{number}") for number in range(1000)):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_for(lambda: not new_processes(), timeout_s=10)


def claiming(png: bytes, width: int, height: int) -> bytes:
    """The same file with other sizes in its header."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]


STRANGE = {
    "cmyk": lambda: encoded(Image.new("CMYK", (40, 30), (0, 255, 255, 0)), "JPEG"),
    "16 bits": lambda: encoded(Image.fromarray(np.full((30, 40), 65535, np.uint16))),
    "palette": lambda: encoded(Image.new("P", (40, 30), 0)),
    "animated": lambda: encoded(
        Image.new("RGB", (40, 30), "red"), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30), "blue")]
    ),
    "turned": lambda: encoded(
        Image.new("RGB", (40, 30)),
        "JPEG",
        exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
    ),
    "grey with alpha": lambda: encoded(Image.new("LA", (40, 30), (0, 0))),
}


def test_strange_pictures_are_right_and_damaged_ones_counted():
    samples = [sample(name, picture()) for name, picture in STRANGE.items()]
    samples += [sample(f"cut {one.key}", one.picture[: len(one.picture) * 2 // 3]) for one in samples]
    samples.append(sample("bomb", claiming(encoded(Image.new("1", (9, 9))), 60_000, 40_000)))
    with DecodePool(Decoding(side=8), workers=1) as pool:
        results = {one.key: result for one, result in zip(samples, pool.map(samples), strict=True)}
    colours = {name: results[name].pixels[0, 4, 4].tolist() for name in STRANGE}
    assert colours["16 bits"] == colours["grey with alpha"] == [255, 255, 255]
    assert colours["palette"] == colours["turned"] == [0, 0, 0]
    assert min(colours["cmyk"][0], colours["animated"][0]) > 200
    assert (results["turned"].width, results["turned"].height) in ((40, 30), (30, 40))
    assert outcome(results["bomb"]) == "too_many_pixels"
    assert {outcome(results[f"cut {name}"]) for name in ("cmyk", "16 bits", "turned")} == {"picture_broken"}
