import os
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preprocessing.sources import open_source
from preprocessing.sources.parquet import ParquetShards
from tests.preprocessing.shards_of_pictures import problems, read_all, write_parquet


@pytest.fixture
def path(tmp_path):
    return tmp_path / "00000.parquet"


def test_the_samples_of_img2dataset_are_read_whole(rows, path):
    write_parquet(path, rows, row_group_size=5)
    source = open_source(path, 1000)
    samples = read_all(source)
    assert source.parts == ["00000"]
    assert source.size(0) == 12
    assert [sample.key for sample in samples] == [row["key"] for row in rows]
    assert [sample.caption for sample in samples] == [row["caption"] for row in rows]
    assert [sample.picture for sample in samples] == [row["jpg"] for row in rows]
    assert samples[3].metadata == {name: rows[3][name] for name in ("NSFW", "url", "original_width", "original_height")}
    assert not any(problems(samples))


def test_of_a_caption_without_end_the_beginning_is_read(rows, path):
    write_parquet(path, [rows[0], {**rows[1], "caption": "a cat " * 10**6}, {**rows[2], "caption": None}])
    captions = [sample.caption for sample in read_all(open_source(path, 1000))]
    assert captions == [rows[0]["caption"], ("a cat " * 10**6)[:65536], None]


def test_a_footer_that_asks_for_gigabytes_is_broken(rows, path):
    write_parquet(path, rows[:2])
    source = open_source(path, 1000)
    os.truncate(path, 2**33)
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write((2**32 - 1).to_bytes(4, "little") + b"PAR1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert problems(read_all(source)) == ["parquet_broken"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_a_picture_that_img2dataset_could_not_download_is_counted(rows, path):
    write_parquet(path, [rows[0], {**rows[1], "jpg": None, "status": "failed_to_download"}, rows[2]])
    assert problems(read_all(open_source(path, 1000))) == [None, "picture_missing", None]


@pytest.mark.parametrize("picture", ["image", "photograph"])
def test_a_column_of_bytes_and_paths_as_datasets_has_it_is_taken_whatever_its_name(rows, path, picture):
    table = [{picture: {"bytes": row["jpg"], "path": None}, "text": row["caption"]} for row in rows]
    write_parquet(path, [*table, {picture: {"bytes": None, "path": "/etc/hostname"}, "text": "a file"}])
    samples = read_all(open_source(path, 1000))
    assert [sample.picture for sample in samples[:-1]] == [row["jpg"] for row in rows]
    assert [sample.caption for sample in samples[:-1]] == [row["caption"] for row in rows]
    assert samples[5].key == "00000.parquet row 5"
    assert samples[-1].problem == "picture_missing"


def test_columns_of_other_names_can_be_named(rows, path):
    write_parquet(path, [{"photo": row["jpg"], "thumb": b"x", "alt": row["caption"]} for row in rows])
    with pytest.raises(ValueError, match="which column holds the pictures; the columns are: photo, thumb, alt"):
        open_source(path, 1000)
    with pytest.raises(ValueError, match="no column 'caption'; there are: photo, thumb, alt"):
        open_source(path, 1000, picture_column="photo", caption_column="caption")
    with pytest.raises(ValueError, match="'alt' does not hold pictures as bytes"):
        open_source(path, 1000, picture_column="alt")
    samples = read_all(open_source(path, 1000, picture_column="photo", caption_column="alt"))
    assert [(sample.picture, sample.caption) for sample in samples] == [(row["jpg"], row["caption"]) for row in rows]


def test_laions_metadata_is_refused_with_the_command_that_downloads_its_pictures(path):
    write_parquet(path, [{"URL": "https://example.org/a.jpg", "TEXT": "a cat", "NSFW": "UNLIKELY"}])
    with pytest.raises(
        ValueError, match=r"img2dataset --url_list \S+00000.parquet --input_format parquet --url_col URL"
    ):
        open_source(path, 1000)


def test_a_caption_that_is_not_utf8_loses_only_the_wrong_bytes(rows, path):
    wrong = pa.array([b"caf\xe9", "猫".encode()]).view(pa.string())
    pq.write_table(pa.table({"jpg": [row["jpg"] for row in rows[:2]], "caption": wrong}), path)
    samples = read_all(open_source(path, 1000))
    assert [sample.caption for sample in samples] == ["caf\N{REPLACEMENT CHARACTER}", "猫"]


def test_lists_for_texts_are_no_caption_key_or_address(rows, path):
    write_parquet(path, [{"jpg": rows[0]["jpg"], "text": ["a", "b"], "key": [1], "url": ["x"]}])
    (sample,) = read_all(open_source(path, 1000))
    assert (sample.picture, sample.caption) == (rows[0]["jpg"], None)
    assert (sample.key, sample.metadata) == ("00000.parquet row 0", {})


def test_of_a_damaged_row_group_every_row_is_counted_and_the_others_are_read(rows, path):
    write_parquet(path, rows, row_group_size=4, compression="none", use_dictionary=False)
    whole = read_all(open_source(path, 1000))
    content = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(1).column(list(rows[0]).index("jpg")).data_page_offset
    content[place : place + 20] = bytes(20)
    path.write_bytes(content)
    samples = read_all(open_source(path, 1000))
    assert problems(samples) == [None] * 4 + ["parquet_broken"] * 4 + [None] * 4
    assert samples[:4] + samples[8:] == whole[:4] + whole[8:]
    assert samples[5].key == "00000.parquet row 5"


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no Parquet" * 100, b"PAR1" + b"\xff" * 100 + b"PAR1"])
def test_what_is_no_parquet_is_one_broken_file(path, content):
    path.write_bytes(content)
    source = open_source(path, 1000)
    assert source.size(0) is None
    assert problems(read_all(source)) == ["parquet_broken"]


def test_a_file_of_other_columns_among_the_rest_is_counted(rows, tmp_path):
    write_parquet(tmp_path / "0.parquet", rows[:2])
    write_parquet(tmp_path / "1.parquet", [{"text": "no picture"}])
    write_parquet(tmp_path / "2.parquet", rows[2:4])
    assert problems(read_all(open_source(tmp_path, 1000))) == [None, None, "parquet_broken", None, None]


def test_few_pictures_are_in_memory_at_once(path):
    pictures = [bytes([number]) * 2**20 for number in range(64)]
    pq.write_table(pa.table({"jpg": pictures}), path, write_batch_size=1, use_dictionary=False, compression="none")
    before, most = pa.total_allocated_bytes(), 0
    for number, sample in enumerate(ParquetShards([str(path)]).samples(0)):
        assert sample.picture == pictures[number]
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 48 * 2**20


@pytest.mark.parametrize(
    "encoding",
    [{"use_dictionary": ["jpg"]}, {"use_dictionary": False, "column_encoding": {"jpg": "DELTA_BYTE_ARRAY"}}],
)
def test_one_value_that_stands_in_every_row_does_not_fill_the_memory(path, encoding):
    picture = bytes(2**22)
    table = pa.table({"jpg": pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array([picture]))})
    table = table if encoding["use_dictionary"] else table.cast(pa.schema([("jpg", pa.binary())]))
    pq.write_table(table, path, compression="brotli", dictionary_pagesize_limit=2**30, store_schema=False, **encoding)
    del table
    assert path.stat().st_size < 2000
    before, most = pa.total_allocated_bytes(), 0
    for sample in ParquetShards([str(path)]).samples(0):
        assert sample.picture == picture
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 48 * 2**20


def test_a_page_that_claims_too_much_does_not_fill_the_memory(path):
    pictures = [bytes([number]) * 3 * 2**19 for number in range(4)]
    pq.write_table(pa.table({"jpg": pictures}), path, write_batch_size=1, use_dictionary=False, row_group_size=2)
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    place = column.data_page_offset + 3  # behind the page's kind: its length, a varint of four bytes
    assert content[place + 3] < 128 <= content[place + 2]
    content[place : place + 4] = b"\xfe\xff\xff\x7f"  # 128 MiB
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert problems(read_all(open_source(path, 1000))) == [None, None, "parquet_broken", "parquet_broken"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KB
