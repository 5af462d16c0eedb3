"""The card and the files of a folder of shards to publish."""

import datasets
import pytest
import yaml

from dalle_lean.errors import UserError
from dalle_lean.io.publish import publish
from preprocessing.shards.publish import shard_files
from tests.training.conftest import write_shards


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "birds")


def metadata(files):
    _, text, _ = files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(text)


def test_a_published_folder_reads_with_load_dataset_as_it_is(folder, tmp_path):
    publish(shard_files(folder, "birds"), str(tmp_path / "out"), message="m")
    rows = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 120
    assert len(rows[0]["code"]) == 2 * 16


def test_a_licence_of_the_hub_and_one_that_it_does_not_know_stand_in_its_fields(folder):
    assert metadata(shard_files(folder, "b"))["license"] == "unknown"
    assert metadata(shard_files(folder, "b", license="cc0-1.0"))["license"] == "cc0-1.0"
    own = metadata(shard_files(folder, "b: [1]", license="ours: #1", license_link="https://x.example/l"))
    assert own["license"] == "other"
    assert own["license_name"] == "ours: #1"
    assert own["license_link"] == "https://x.example/l"
    assert own["pretty_name"] == "b: [1]"


def test_a_card_of_the_folders_own_goes_as_it_is(folder):
    (folder / "README.md").write_text("# Mine\n")
    assert shard_files(folder, "b")["README.md"] == folder / "README.md"


def test_a_shard_that_the_disk_cannot_read_is_named(folder, unreadable):
    unreadable("shard-00001.parquet")
    with pytest.raises(UserError, match=r"shard-00001\.parquet is damaged or no shard: .* Input/output error"):
        shard_files(folder, "b")


def test_a_damaged_shard_is_not_published(folder):
    with open(folder / "shard-00001.parquet", "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"shard-00001\.parquet has changed since it was written"):
        shard_files(folder, "b")
