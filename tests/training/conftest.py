"""Shards small enough to train on in seconds."""

from pathlib import Path

import numpy as np
import pytest

from preprocessing.shards.files import Row, write_shard
from preprocessing.shards.manifest import Counts, DatasetInfo, write_dataset_info

COLOURS = ("red", "green", "blue", "black")
THINGS = ("heart", "circle", "square", "book", "tree")


def write_shards(
    folder: Path,
    rows: int = 120,
    *,
    shard_rows: int = 32,
    image_side: int = 4,
    codebook_size: int = 32,
) -> Path:
    """Captions "a COLOUR THING" with codes that follow from them, so that there is something to learn."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    content = []
    for index in range(rows):
        colour, thing = random.integers(len(COLOURS)), random.integers(len(THINGS))
        noise = random.integers(0, 2, image_side**2)
        content.append(
            Row(
                caption=f"a {COLOURS[colour]} {THINGS[thing]}",
                codes=(colour * 5 + thing + noise).astype(np.int16),
                nsfw="UNLIKELY",
                original_width=32,
                original_height=32,
                url=None,
                key=f"picture-{index}",
            )
        )
    parts = [content[start : start + shard_rows] for start in range(0, rows, shard_rows)]
    shards = [write_shard(folder / f"shard-{number:05d}.parquet", part) for number, part in enumerate(parts)]
    info = DatasetInfo(
        vqgan="a" * 64,
        image_side=image_side,
        codebook_size=codebook_size,
        picture_side=8 * image_side,
        counts=Counts(seen=rows, kept=rows),
        shards=tuple(shards),
    )
    write_dataset_info(folder, info)
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """120 pictures of 4x4 codes out of 32, in four shards."""
    return write_shards(tmp_path_factory.mktemp("shards") / "train")


class Clock:
    """The seconds that a run's time limit counts."""

    def __init__(self):
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `advance` moves."""
    clock = Clock()
    monkeypatch.setattr("training.run.graceful_stop.monotonic", lambda: clock.now_s)
    return clock
