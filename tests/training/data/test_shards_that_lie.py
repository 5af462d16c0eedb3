"""Shards whose end says what cannot be, and captions without end."""

import io
import os
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dalle_lean.io.parquet_footer import MOST_FOOTER_BYTES, check_footer
from preprocessing.shards.files import DamagedShard, read_blocks, read_header
from tests.training.conftest import write_shards
from training.data.catalog import find_shards
from training.data.reader import read_rows


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (b"", "does not end as"),
        (b"PAR1", "does not end as"),
        (b"\0\0\0\0PAR2", "does not end as"),
        (b"\1\0\0\0PAR1", "its footer cannot have 1 bytes"),
        (bytes(100) + b"\x61\0\0\0PAR1", "its footer cannot have 97 bytes"),
    ],
)
def test_an_end_that_cannot_be_is_refused(end, words):
    with pytest.raises(ValueError, match=words):
        check_footer(io.BytesIO(end))


def test_the_end_of_a_shard_is_taken_and_the_file_is_read_from_its_beginning(shards):
    with open(next(shards.glob("*.parquet")), "rb") as file:
        check_footer(file)
        assert file.tell() == 0


def lie(path):
    """Four gigabytes of footer, in a file that takes no room."""
    os.truncate(path, 0)
    os.truncate(path, 2**33)
    with open(path, "r+b") as file:
        file.seek(-8, io.SEEK_END)
        file.write((2**32 - 1).to_bytes(4, "little") + b"PAR1")
    return path


def test_nobody_takes_the_memory_that_a_footer_asks_for(tmp_path):
    folder = write_shards(tmp_path / "shards", rows=8)
    path = lie(next(folder.glob("*.parquet")))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = "its footer cannot have 4,294,967,295 bytes"
    with pytest.raises(ValueError, match=words):
        read_header(path)
    with pytest.raises(ValueError, match=words):
        next(read_blocks(path, 16, 32))
    with pytest.raises(DamagedShard, match=words):
        next(read_rows(find_shards(folder), 0, 0, 8))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_the_limit_is_beyond_any_real_footer(shards):
    path = next(shards.glob("*.parquet"))
    with open(path, "rb") as file:
        file.seek(-8, io.SEEK_END)
        assert 1000 * int.from_bytes(file.read(4), "little") < MOST_FOOTER_BYTES


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_of_a_caption_without_end_the_beginning_is_read(tmp_path, kind):
    folder = write_shards(tmp_path / "shards", rows=8)
    path = next(folder.glob("*.parquet"))
    table = pq.read_table(path)
    captions = table.column("caption").to_pylist()
    captions[3] = "é " * 10**6
    place = table.schema.get_field_index("caption")
    pq.write_table(table.set_column(place, "caption", pa.array(captions, kind)), path)
    expected = [*captions[:3], captions[3][:65536], *captions[4:]]
    assert [caption for rows in read_rows(find_shards(folder), 0, 0, 8) for caption in rows.captions] == expected
    assert [caption for batch in read_blocks(path, 16, 32) for caption in batch.captions] == expected
