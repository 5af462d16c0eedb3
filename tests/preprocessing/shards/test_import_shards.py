"""Files of the published data set, as they are, become a folder of shards that training takes."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dalle_lean.errors import UserError
from preprocessing.shards.files import write_shard
from preprocessing.shards.import_shards import import_shards
from preprocessing.shards.manifest import read_dataset_info
from preprocessing.shards.verify import find_faults
from tests.preprocessing.runs import run_command
from tests.preprocessing.shard_folders import make_rows, random_codes, stored_rows, write_published


@pytest.fixture
def published(tmp_path, vqgan):
    """Two files of 500 and 100 rows in several row groups; the codes are of the VQGAN."""
    folder = tmp_path / "published"
    folder.mkdir()
    write_published(folder / "part-00000-of-00002.parquet", random_codes(vqgan, 500, 0), row_group_size=150)
    write_published(folder / "part-00001-of-00002.parquet", random_codes(vqgan, 100, 1))
    return folder


def test_adopted_files_stay_as_they_are_and_are_read_in_order(published, vqgan):
    before = {path.name: path.read_bytes() for path in published.iterdir()}
    progress = []
    info = import_shards(published, vqgan, on_progress=lambda *step: progress.append(step))
    assert info == read_dataset_info(published)
    assert (info.image_side, info.codebook_size, info.picture_side) == (2, 64, 16)
    assert [shard.rows for shard in info.shards] == [500, 100]
    assert progress[-1][:2] == (600, 600)
    assert {name: (published / name).read_bytes() for name in before} == before
    rows = list(stored_rows(published))
    expected = np.concatenate([random_codes(vqgan, 500, 0), random_codes(vqgan, 100, 1)])
    assert (np.stack([row["codes"] for row in rows]) == expected).all()
    assert find_faults(published, vqgan=vqgan) == []


def test_training_takes_adopted_files(published, vqgan, vqgan_folder, tmp_path):
    assert run_command("shards", "adopt", published, "--vqgan", vqgan_folder) == 0
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    arguments = ["train", published, tmp_path / "run", "--config", recipe, "--vqgan", vqgan_folder, "--steps", 2]
    assert run_command(*arguments, "--device", "cpu") == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def spoil_first_codes(path):
    """Overwrite the first page of the column of codes; what the footer says stays right."""
    column = parquet.ParquetFile(path).metadata.row_group(0)
    index = next(index for index in range(column.num_columns) if column.column(index).path_in_schema == "code")
    with path.open("r+b") as file:
        file.seek(column.column(index).data_page_offset + 30)
        file.write(b"\xff" * 40)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "dataset.json").write_text("{}"), "has a dataset.json already"),
        (lambda folder: (folder / ".progress").mkdir(), "is the unfinished output of dalle-lean preprocess"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "holds no Parquet files"),
        (lambda folder: (folder / "part 3.parquet").write_bytes(b""), "'part 3.parquet' is no name for a shard"),
        (lambda folder: (folder / "x.parquet").write_bytes(b""), "x.parquet is damaged or no shard"),
        (lambda folder: spoil_first_codes(folder / "part-00000-of-00002.parquet"), "00000-of-00002.parquet is damaged"),
        (lambda folder: write_published(folder / "a.parquet", np.zeros((0, 4))), "a.parquet has no rows"),
        (lambda folder: claim_a_row(folder / "a.parquet"), "a.parquet is damaged or no shard: it has 0 of its 1 rows"),
        (lambda folder: claim_a_row(folder / "z.parquet"), "z.parquet is damaged or no shard: it has 0 of its 1 rows"),
        (lambda folder: write_published(folder / "a.parquet", np.zeros((5, 3))), "a.parquet: the first picture has 6"),
        (lambda folder: write_published(folder / "z.parquet", np.zeros((5, 9))), "18 bytes of codes; must be 8"),
        (lambda folder: write_published(folder / "z.parquet", np.full((5, 4), 64)), "codes 64..64; must be in 0..63"),
        (
            lambda folder: write_shard(folder / "a.parquet", make_rows(np.zeros((2, 4))), vqgan="b" * 64),
            "a.parquet: its codes are of the VQGAN bbbbbbbbbbbb",
        ),
    ],
)
def test_what_cannot_be_adopted_is_refused_by_name(published, vqgan, spoil, message):
    spoil(published)
    had_manifest = (published / "dataset.json").exists()
    with pytest.raises(ValueError, match=re.escape(message)):
        import_shards(published, vqgan)
    assert (published / "dataset.json").exists() == had_manifest


def claim_a_row(path):
    """Write a file without row groups whose footer claims a row."""
    parquet.ParquetWriter(path, pa.schema({"caption": pa.string(), "code": pa.binary()})).close()
    no_rows, one_row = bytes.fromhex("1600 190c"), bytes.fromhex("1602 190c")  # num_rows, then an empty list
    content = path.read_bytes()
    assert content.count(no_rows) == 1
    path.write_bytes(content.replace(no_rows, one_row))


def test_a_file_that_the_disk_cannot_read_is_named(published, vqgan, unreadable):
    unreadable("part-00001-of-00002.parquet")
    with pytest.raises(UserError, match=r"00001-of-00002\.parquet is damaged or no shard: .* Input/output error"):
        import_shards(published, vqgan)


def test_the_manifest_says_that_the_files_were_adopted(published, vqgan):
    import_shards(published, vqgan)
    assert json.loads((published / "dataset.json").read_text())["settings"] == {"adopted": True}


RECIPE = """
[model]
text_len = 4
image_side = 2
hidden_size = 16
num_layers = 2
num_heads = 1
head_size = 16
attention_pattern = ["row"]

[optimizer]
name = "adamw"

[schedule]
peak_lr = 1e-3
warmup_steps = 1
total_steps = 2

[data]
batch_size = 8
text_vocab_size = 300
shuffle_buffer = 100
"""
