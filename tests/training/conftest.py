"""Shards and a recipe small enough to train in seconds, and what else several tests of training take."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from dalle_lean.tokenizer import Tokenizer
from preprocessing.shards.files import Row, write_shard
from preprocessing.shards.manifest import Counts, DatasetInfo, write_dataset_info
from training.data.sampler import Position
from training.run.recipe import load_recipe

COLOURS = ("red", "green", "blue", "black")
THINGS = ("heart", "circle", "square", "book", "tree")


def write_shards(
    folder: Path,
    rows: int = 120,
    *,
    shard_rows: int = 32,
    image_side: int = 4,
    codebook_size: int = 32,
    vqgan: str = "a" * 64,
) -> Path:
    """Captions "a COLOUR THING" with codes that follow from them, so that there is something to learn.

    vqgan: fingerprint of the one that is said to have made the codes.
    """
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
        vqgan=vqgan,
        image_side=image_side,
        codebook_size=codebook_size,
        picture_side=8 * image_side,
        counts=Counts(seen=rows, kept=rows),
        shards=tuple(shards),
    )
    write_dataset_info(folder, info)
    return folder


def windows_of_a_pass(data, start=Position()):
    """The windows of TrainingData from a position to the end of its pass, each with its position."""
    return takewhile(lambda window: window[1].epoch == start.epoch, data.windows(start))


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """120 pictures of 4x4 codes out of 32, in four shards."""
    return write_shards(tmp_path_factory.mktemp("shards") / "train")


@pytest.fixture
def recipe():
    return load_recipe("tiny")


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train(["a red heart", "a blue book"], 300)


@pytest.fixture
def noticed():
    """The notices of a reader."""
    return []


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
