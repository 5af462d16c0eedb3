"""What other tools write is read, and what is written here they read."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset

from preprocessing.encoding.encode import preprocess
from preprocessing.sources import open_source
from tests.preprocessing.shard_folders import stored_rows
from tests.preprocessing.shards_of_pictures import emoji_rows, read_all

IMG2DATASET = Path(__file__).parents[1] / "data" / "img2dataset"
"""Six pictures and an address with none, written by img2dataset 1.47.0 (tests/data/make_img2dataset.py)."""


@pytest.fixture(scope="module")
def captions(emoji):
    return {json.loads(line)["text"] for line in (emoji / "metadata.jsonl").read_text().splitlines()[:6]}


@pytest.mark.parametrize(("written", "missing"), [("webdataset", {}), ("parquet", {"picture_missing": 1})])
def test_what_img2dataset_wrote_is_encoded(vqgan, tmp_path, captions, written, missing):
    info = preprocess(open_source(IMG2DATASET / written, 8), tmp_path / "out", vqgan)
    assert info.counts.rejected == {"nsfw": 1, **missing}
    rows = [row for path in (tmp_path / "out").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 5
    assert {row["caption"] for row in rows} < captions
    assert all(row["url"].startswith("http://127.0.0.1") and row["original_width"] == 96 for row in rows)


@pytest.mark.parametrize(
    ("pattern", "shard"),
    [
        ("webdataset/*", "webdataset/00000.tar"),
        ("webdataset/00000.*", "webdataset/00000.tar"),
        ("parquet/*", "parquet/00000.parquet"),
    ],
)
def test_a_pattern_may_match_what_img2dataset_writes_beside_its_shards(pattern, shard):
    assert open_source(f"{IMG2DATASET}/{pattern}", 8).paths == [str(IMG2DATASET / shard)]


def test_of_folders_of_shards_and_a_shard_beside_them_a_pattern_takes_the_folders(tmp_path):
    for name in ("one/00000.tar", "two/00000.tar", "stray.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(IMG2DATASET / "webdataset" / "00000.tar", tmp_path / name)
    assert open_source(f"{tmp_path}/*", 8).paths == [str(tmp_path / name / "00000.tar") for name in ("one", "two")]
    (tmp_path / "notes").mkdir()
    for name in ("one", "two"):
        shutil.rmtree(tmp_path / name)
    assert open_source(f"{tmp_path}/*", 8).paths == [str(tmp_path / "stray.tar")]


def test_what_webdataset_wrote_is_read_and_it_reads_the_same(emoji, tmp_path):
    rows = emoji_rows(emoji, 6)
    pattern = str(tmp_path / "%05d.tar")
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
        for row in rows:
            metadata = {name: row[name] for name in ("NSFW", "url")}
            writer.write({"__key__": row["key"], "jpg": row["jpg"], "txt": row["caption"], "json": metadata})
    source = open_source(tmp_path, 8)
    assert len(source.parts) == 2
    ours = [(one.key, one.picture, one.caption, one.metadata) for one in read_all(source)]
    shards = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    theirs = [
        (one["__key__"], one["jpg"], one["txt"].decode(), json.loads(one["json"]))
        for one in webdataset.WebDataset(shards, shardshuffle=False)
    ]
    assert ours == theirs
    assert [picture for _, picture, _, _ in ours] == [row["jpg"] for row in rows]


@pytest.fixture(scope="module")
def shards(emoji, vqgan, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards")
    preprocess(open_source(emoji, 150), out, vqgan)
    return out


@pytest.mark.parametrize("reader", ["datasets", "datasets, streamed", "pyarrow"])
def test_the_shards_are_read_by(reader, shards, tmp_path):
    files = [str(path) for path in sorted(shards.glob("*.parquet"))]
    assert len(files) == 2
    if reader == "pyarrow":
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    else:
        options = {"streaming": True} if "streamed" in reader else {"cache_dir": str(tmp_path)}
        rows = list(datasets.load_dataset("parquet", data_files=files, split="train", **options))
    ours = list(stored_rows(shards))
    assert [row["caption"] for row in rows] == [row["caption"] for row in ours]
    codes = [np.frombuffer(row["code"], "<i2").tolist() for row in rows]
    assert codes == [row["codes"].tolist() for row in ours]
