"""Spoilt tars, Parquet files and pictures: nothing crashes, nothing is lost uncounted, memory stays bounded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from preprocessing.encoding.decode_pool import DecodePool
from preprocessing.encoding.decoding import Candidate, Decoding
from preprocessing.sources import open_source
from tests.preprocessing.shards_of_pictures import emoji_rows, tar_bytes

ROOT = Path(__file__).parents[2]
SIDE = 16
REASONS = {
    "picture": {"kept", "picture_broken", "too_many_pixels"},
    "tar": {"kept", "tar_broken", "picture_missing", "picture_broken", "caption_missing", "caption_short"}
    | {"metadata_broken", "too_many_pixels"},
    "parquet": {"kept", "parquet_broken", "picture_broken", "picture_missing", "caption_missing", "caption_short"}
    | {"nsfw", "size_not_positive", "aspect_ratio", "too_many_pixels"},
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("picture", 260), ("tar", 120), ("parquet", 120)])
def test_what_is_spoilt_is_counted_and_ends_nothing(kind, count):
    command = [sys.executable, "-m", "tests.preprocessing.fuzz", kind, str(count)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["broken"] == []
    assert set(report["reasons"]) <= REASONS[kind]
    assert report["reasons"]["kept"] >= 24  # most of a file is sound, and the reading gets there
    assert sum(report["reasons"].values()) - report["reasons"]["kept"] >= count // 4
    # Arrow takes as much for a damaged page as its header says, 2 GiB at most.
    assert report["grown_bytes"] < (2200 if kind == "parquet" else 160) * 2**20


@pytest.mark.parametrize("depth", [1, 500, 900])
@pytest.mark.parametrize("name", ["url", "NSFW", "original_width"])
def test_metadata_nested_however_deep_costs_no_picture(emoji, tmp_path, name, depth):
    (row,) = emoji_rows(emoji, 1)
    metadata = f'{{"caption": "a smiling face", "{name}": {"[" * depth}{"]" * depth}}}'
    (tmp_path / "0.tar").write_bytes(tar_bytes([("0.jpg", row["jpg"]), ("0.json", metadata.encode())]))
    with DecodePool(Decoding(side=SIDE), workers=1) as pool:
        (result,) = pool.map(open_source(tmp_path, 1).samples(0))
    assert isinstance(result, Candidate)
