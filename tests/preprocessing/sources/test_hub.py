import json
import pickle
import zipfile

import datasets
import pyarrow as pa
import pytest

from dalle_lean.errors import UserError
from dalle_lean.io.remote_io import Unreachable
from preprocessing.sources import open_source
from preprocessing.sources.columns import Columns
from preprocessing.sources.hub import StreamedDataset, read_rows, with_picture
from tests.preprocessing.shards_of_pictures import problems, read_all

COLUMNS = Columns("image", "text", ["image", "text"])


class ReadTimeout(Exception):
    """No OSError, as the hub's HTTP library has it."""


def failing(error: Exception):
    """One row, and then a failure."""
    yield {"image": b"picture", "text": "a cat"}
    raise error


def table(rows) -> datasets.Dataset:
    """As `datasets` has pictures."""
    listed = [{"picture": {"bytes": row["jpg"], "path": None}, "text": row["caption"]} for row in rows]
    features = {"picture": datasets.Image(), "text": datasets.Value("string")}
    return datasets.Dataset.from_list(listed, features=datasets.Features(features))


@pytest.fixture
def repository(rows, tmp_path):
    """Files as they lie in a data set's repository."""
    folder = tmp_path / "owner" / "emoji"
    (folder / "data").mkdir(parents=True)
    for shard in range(3):
        part = table(rows[shard * 4 : shard * 4 + 4])
        part.to_parquet(folder / "data" / f"train-{shard:05d}-of-00003.parquet")
    table(rows[:2]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    return folder


def test_a_streamed_data_set_gives_undecoded_pictures_shard_by_shard(rows, repository):
    source = StreamedDataset(str(repository))
    assert source.parts == ["00000", "00001", "00002"]
    assert source.size(0) is None
    assert [sample.picture for sample in source.samples(2)] == [row["jpg"] for row in rows[8:]]
    samples = read_all(source)
    assert [(sample.picture, sample.caption) for sample in samples] == [(row["jpg"], row["caption"]) for row in rows]
    assert len({sample.key for sample in samples}) == 12


@pytest.mark.parametrize("archived", [False, True])
def test_loose_pictures_are_read_by_the_paths_that_the_data_set_has_for_them(rows, tmp_path, archived):
    folder = tmp_path / "owner" / "loose"
    (folder / "train").mkdir(parents=True)
    lines = [json.dumps({"file_name": f"{number}.jpg", "text": row["caption"]}) for number, row in enumerate(rows)]
    files = {"metadata.jsonl": "\n".join(lines).encode(), **{f"{n}.jpg": row["jpg"] for n, row in enumerate(rows)}}
    if archived:
        with zipfile.ZipFile(folder / "train" / "a.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        for name, content in files.items():
            (folder / "train" / name).write_bytes(content)
    samples = read_all(StreamedDataset(str(folder)))
    expected = {(row["jpg"], row["caption"]) for row in rows}
    assert {(sample.picture, sample.caption) for sample in samples} == expected


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/hostname", "hf://datasets/other/secret/a.jpg", "zip://a.jpg::/tmp/a.zip", 3, None),
        *("/etc/hostname::/data/a.jpg", "file:///etc/hostname::/data/a.jpg", "http://10.0.0.1/::/data/a.jpg"),
    ],
)
def test_a_path_that_is_not_the_data_sets_own_is_not_opened(path):
    row = {"image": {"bytes": None, "path": path}, "text": "a cat"}
    assert with_picture(row, "image", {"/data/a.jpg"}) is row


@pytest.mark.parametrize("member", ["", "zip://a.jpg::", "zip://b.jpg::"])
def test_a_picture_that_is_not_there_or_damaged_costs_its_row_alone(tmp_path, member):
    path = tmp_path / "a.zip"
    if member:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jpg", bytes(1000))
        path.write_bytes(path.read_bytes().replace(b"PK\1\2", b"PK\1\3") if "a.jpg" in member else path.read_bytes())
    row = {"image": {"bytes": None, "path": f"{member}{path}"}, "text": "a cat"}
    assert with_picture(row, "image", {str(path)}) is row


def test_a_data_set_that_is_a_program_is_a_mistake(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Dataset scripts are no longer supported, but found old.py")

    monkeypatch.setattr("preprocessing.sources.hub.builder", refuse)
    with pytest.raises(UserError, match="owner/old: cannot be read as a data set: Dataset scripts are no longer"):
        open_source("owner/old", 5)


def test_another_split_can_be_taken(rows, repository):
    source = StreamedDataset(str(repository), split="test")
    assert [sample.picture for sample in read_all(source)] == [row["jpg"] for row in rows[:2]]
    with pytest.raises(ValueError, match="Available splits"):
        StreamedDataset(str(repository), split="gone")


def test_another_process_reads_the_same(repository):
    source = StreamedDataset(str(repository))
    again = pickle.loads(pickle.dumps(source))
    assert read_all(again) == read_all(source)
    assert again.fingerprint() == source.fingerprint()


def test_the_fingerprint_tells_changed_files(rows, repository):
    before = StreamedDataset(str(repository)).fingerprint()
    assert StreamedDataset(str(repository), split="test").fingerprint() != before
    table(rows[:3]).to_parquet(repository / "data" / "train-00001-of-00003.parquet")
    assert StreamedDataset(str(repository)).fingerprint() != before


def test_where_a_shard_cannot_be_read_the_loss_is_counted(repository):
    damaged = repository / "data" / "train-00001-of-00003.parquet"
    source = StreamedDataset(str(repository))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert problems(source.samples(1)) == ["dataset_broken"]
    assert problems(source.samples(2)) == [None] * 4


@pytest.mark.parametrize(
    "error",
    [ReadTimeout("slow"), ConnectionError("refused"), OSError("503"), FileNotFoundError("404"), RuntimeError("closed")],
)
def test_a_hub_that_fails_leaves_the_part_for_later_and_counts_no_loss(error):
    samples = read_rows(failing(error), COLUMNS, "00000 row", 0, remote=True)
    assert next(samples).problem is None
    with pytest.raises(Unreachable, match=f"00000 row 1: {type(error).__name__}"):
        next(samples)


@pytest.mark.parametrize(
    ("error", "remote"),
    [(pa.ArrowInvalid("page"), True), (ValueError("JSON"), True), (OSError("read"), False), (KeyError("x"), False)],
)
def test_damage_is_counted_wherever_the_files_are(error, remote):
    samples = read_rows(failing(error), COLUMNS, "00000 row", 0, remote=remote)
    assert problems(samples) == [None, "dataset_broken"]


def test_a_data_set_without_pictures_is_a_mistake(tmp_path):
    datasets.Dataset.from_list([{"text": "a cat"}]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="which column holds the pictures; the columns are: text"):
        StreamedDataset(str(tmp_path))


def test_a_saved_data_set_is_cut_into_parts(rows, tmp_path):
    table(rows).save_to_disk(tmp_path / "saved")
    source = open_source(tmp_path / "saved", 5)
    assert [source.size(part) for part in range(len(source.parts))] == [5, 5, 2]
    assert [sample.picture for sample in source.samples(1)] == [row["jpg"] for row in rows[5:10]]
    assert next(sample.key for sample in source.samples(1)) == "row 5"
    again = pickle.loads(pickle.dumps(source))
    assert read_all(again) == read_all(source)
    assert again.fingerprint() == source.fingerprint()


def test_of_a_saved_data_set_with_splits_one_is_asked_for(rows, tmp_path):
    datasets.DatasetDict(train=table(rows[:4]), test=table(rows[4:])).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"name one of \S+test, \S+train"):
        open_source(tmp_path, 5)
    assert len(read_all(open_source(tmp_path / "train", 5))) == 4


def test_a_damaged_saved_data_set_is_a_mistake(rows, tmp_path):
    table(rows).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(b"no table")
    with pytest.raises(ValueError, match="cannot be read as a saved data set"):
        open_source(tmp_path / "saved", 5)


def test_a_name_that_is_neither_here_nor_within_reach_says_both():
    with pytest.raises(
        Unreachable, match=r"nobody/nothing: no such folder or file here, and the hub.*cannot be reached"
    ):
        open_source("nobody/nothing", 5)
