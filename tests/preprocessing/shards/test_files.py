import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preprocessing.shards.files import naming_damage, write_shard
from preprocessing.shards.manifest import Counts, DatasetInfo, read_dataset_info, write_dataset_info
from tests.preprocessing.shard_folders import make_rows, read_rows, stored_rows, write_published

NUM_CODES, CODEBOOK_SIZE = 16, 100


def some_rows(num_rows, seed=0):
    codes = np.random.default_rng(seed).integers(0, CODEBOOK_SIZE, (num_rows, NUM_CODES), dtype=np.int16)
    return make_rows(codes, seed)


@pytest.fixture
def rows():
    return some_rows(700, seed=0) + some_rows(300, seed=1)


def test_codes_are_as_small_as_brotli_makes_them(tmp_path):
    patches = np.random.default_rng(0).geometric(0.1, (2000, 2, 2)).astype(np.int16)
    pictures = patches.repeat(2, axis=1).repeat(2, axis=2).reshape(-1, NUM_CODES)
    write_shard(tmp_path / "shard.parquet", [replace(some_rows(1)[0], codes=codes) for codes in pictures])
    table = pa.table({"code": pa.array([codes.tobytes() for codes in pictures], pa.binary())})
    for level in (8, 11):
        options = {"compression": "brotli", "compression_level": level, "use_dictionary": False}
        pq.write_table(table, tmp_path / f"{level}.parquet", **options)
    written, usual, best = (column_bytes(tmp_path / f"{name}.parquet", "code") for name in ("shard", 8, 11))
    assert written == best < 0.9 * usual


def column_bytes(path, name):
    """Of the column as it is stored."""
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    return next(column.total_compressed_size for column in columns if column.path_in_schema == name)


@pytest.fixture
def folder(tmp_path, rows):
    """Two shards of 700 and 300 rows."""
    shards = (
        write_shard(tmp_path / "shard-00000.parquet", rows[:700]),
        write_shard(tmp_path / "shard-00001.parquet", rows[700:]),
    )
    info = DatasetInfo(
        vqgan="0" * 64,
        image_side=4,
        codebook_size=CODEBOOK_SIZE,
        picture_side=32,
        counts=Counts(seen=1100, kept=1000, rejected={"nsfw": 60, "aspect_ratio": 40}),
        shards=shards,
        settings={"max_pixels": 5},
    )
    write_dataset_info(tmp_path, info)
    return tmp_path


def test_a_shard_is_brotli_parquet_with_the_published_columns(tmp_path, rows):
    write_shard(tmp_path / "x.parquet", rows)
    file = pq.ParquetFile(tmp_path / "x.parquet")
    types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
    assert types == {
        "caption": pa.string(),
        "code": pa.binary(),
        "NSFW": pa.string(),
        "original_width": pa.int32(),
        "original_height": pa.int32(),
        "url": pa.string(),
        "key": pa.string(),
    }
    assert {file.metadata.row_group(0).column(column).compression for column in range(7)} == {"BROTLI"}
    code = file.read()["code"][5].as_py()
    assert code == b"".join(int(value).to_bytes(2, "little") for value in rows[5].codes)


def test_the_same_rows_give_the_same_bytes(tmp_path, rows):
    first, second = (write_shard(tmp_path / name, rows) for name in ("a.parquet", "b.parquet"))
    assert first.sha256 == second.sha256
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_the_stream_gives_back_every_row_in_order(folder, rows):
    streamed = list(stored_rows(folder))
    assert [row["caption"] for row in streamed] == [row.caption for row in rows]
    assert [row["key"] for row in streamed] == [row.key for row in rows]
    assert (np.stack([row["codes"] for row in streamed]) == np.stack([row.codes for row in rows])).all()


def test_dataset_json_comes_back_as_it_was_written(folder):
    info = read_dataset_info(folder)
    assert info.num_codes == NUM_CODES
    assert info.counts == Counts(seen=1100, kept=1000, rejected={"nsfw": 60, "aspect_ratio": 40})
    assert [shard.rows for shard in info.shards] == [700, 300]
    before = (folder / "dataset.json").read_bytes()
    write_dataset_info(folder, info)
    assert (folder / "dataset.json").read_bytes() == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other/1", "not of format"),
        (("vqgan",), "../..", "vqgan='../..'"),
        (("image_side",), 0, "image_side=0"),
        (("image_side",), "4", "image_side='4'"),
        (("image_side",), 10**15, "image_side=1000000000000000: must be an integer from 1 to 1024"),
        (("codebook_size",), 2**15 + 1, "codebook_size=32769: must be an integer from 2 to 32768"),
        (("picture_side",), True, "picture_side=True"),
        (("counts", "kept"), 999, "kept=999, but the shards have 1000 rows"),
        (("counts", "rejected"), {"nsfw": -1}, "nsfw=-1"),
        (("counts", "rejected"), [], "rejected=[]: must be an object"),
        (("settings",), 3, "settings=3"),
        (("counts",), None, "dataset.json"),
        (("shards",), [3], "dataset.json"),
        (("shards", 0, "file"), "../outside.parquet", "file='../outside.parquet'"),
        (("shards", 0, "file"), "shard-00009.parquet", "shard-00009.parquet, which is in dataset.json, is missing"),
        (("shards", 1, "rows"), 2.5, "rows=2.5"),
        (("shards", 1, "sha256"), "abc", "sha256='abc'"),
    ],
)
def test_a_wrong_dataset_json_is_refused_by_name(folder, path, value, message):
    content = json.loads((folder / "dataset.json").read_text())
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"dataset\.json") as mistake:
        read_dataset_info(folder)
    assert message in str(mistake.value)


@pytest.mark.parametrize("missing", ["vqgan", "image_side", "codebook_size", "counts", "shards"])
def test_a_missing_field_is_named(folder, missing):
    content = json.loads((folder / "dataset.json").read_text())
    del content[missing]
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"dataset.json: no field '{missing}'"):
        read_dataset_info(folder)


def test_an_unfinished_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no dataset\.json"):
        stored_rows(tmp_path)


def test_a_damaged_shard_is_named(folder):
    path = folder / "shard-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    stream = iter(stored_rows(folder))
    for _ in range(700):
        next(stream)
    with pytest.raises(ValueError, match=r"shard-00001\.parquet is damaged or no shard"):
        next(stream)


@pytest.mark.parametrize(
    ("num_codes", "codebook_size", "message"),
    [
        (NUM_CODES + 1, CODEBOOK_SIZE, "32 bytes of codes; must be 34"),
        (NUM_CODES, 50, r"codes 0\.\.99; must be in 0\.\.49"),
    ],
)
def test_codes_of_another_length_or_range_are_refused(folder, num_codes, codebook_size, message):
    paths = [str(folder / "shard-00000.parquet")]
    with pytest.raises(ValueError, match=rf"shard-00000\.parquet.*{message}"):
        next(read_rows(paths, num_codes, codebook_size))


def test_damaged_bytes_never_raise_anything_else(tmp_path):
    """Without a checksum per page a changed byte may go unseen; then codes still have their length and range."""
    random = np.random.default_rng(0)
    path = tmp_path / "x.parquet"
    write_shard(path, some_rows(20))
    whole = path.read_bytes()
    refused = read = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for position in random.integers(0, len(whole), random.integers(1, 6)):
            damaged[position] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            for row in read_rows([str(path)], NUM_CODES, CODEBOOK_SIZE):
                assert row["codes"].shape == (NUM_CODES,)
                assert 0 <= row["codes"].min() <= row["codes"].max() < CODEBOOK_SIZE
        except ValueError as error:
            refused += "x.parquet is damaged" in str(error)
        else:
            read += 1
    assert refused > 100
    assert refused + read == 200


@pytest.mark.parametrize(
    "columns",
    [
        {"caption": ["a cat"]},
        {"caption": ["a cat"], "code": [None]},
        {"caption": [None], "code": [bytes(2 * NUM_CODES)]},
        {"caption": ["a cat"], "code": [3]},
        {"caption": [3], "code": [bytes(2 * NUM_CODES)]},
    ],
)
def test_a_parquet_that_is_no_shard_is_named(tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet is damaged or no shard"):
        next(read_rows([str(tmp_path / "x.parquet")], NUM_CODES, CODEBOOK_SIZE))


def test_in_a_shard_without_keys_they_are_the_numbers_of_its_rows(tmp_path):
    codes = [row.codes.tobytes() for row in some_rows(300)]
    pq.write_table(pa.table({"caption": ["a cat"] * 300, "code": codes}), tmp_path / "x.parquet")
    streamed = read_rows([tmp_path / "x.parquet"], NUM_CODES, CODEBOOK_SIZE)
    assert [row["key"] for row in streamed] == [str(number) for number in range(300)]


def test_files_of_the_published_data_set_are_read_as_they_are(tmp_path):
    """The published files have more columns, other number types and several row groups."""
    codes = np.random.default_rng(0).integers(0, 8192, (1000, 1024), dtype=np.int16)
    write_published(tmp_path / "part-0.parquet", codes)
    streamed = list(read_rows([str(tmp_path / "part-0.parquet")], 1024, 8192))
    assert (np.stack([row["codes"] for row in streamed]) == codes).all()
    assert streamed[999]["caption"] == "a caption of part-0, number 999"
    assert streamed[999]["key"] == "999"


def test_memory_that_runs_out_is_no_damage():
    with pytest.raises(MemoryError, match=r"shard\.parquet: malloc of"), naming_damage("shard.parquet"):
        raise pa.ArrowMemoryError("malloc of size 64 failed")
