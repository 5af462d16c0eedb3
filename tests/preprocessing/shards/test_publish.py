"""`dalle-lean shards publish` to an S3 server and to a hub, both on loopback, by real clients."""

import json
import signal
import subprocess

import pytest

from tests.children import PROGRAM, start
from tests.storages import ROOT, until
from tests.training.conftest import write_shards

SIZES = {"rows": 1200, "shard_rows": 300, "image_side": 16}
"""Four shards, each of which outweighs the note of what has arrived."""


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "birds", **SIZES)


@pytest.mark.slow
def test_shards_go_to_a_bucket_and_a_killed_copy_continues(s3, folder, tmp_path):
    with s3.held("shard-00002.parquet") as is_held:
        first = start(
            [*PROGRAM, "shards", "publish", str(folder), "s3://pictures/birds"],
            env=s3.environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(is_held)
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = len(s3.written)
    said = s3.program("shards", "publish", folder, "s3://pictures/birds")
    again = [name for name in s3.written[before:] if name != ".published"]
    assert again == ["shard-00002.parquet", "shard-00003.parquet", "README.md", "dataset.json"]
    assert "4 files sent, 2 were there" in said
    assert s3.secret not in said

    write_shards(tmp_path / "fewer", **SIZES | {"rows": 900})
    before = len(s3.written)
    s3.program("shards", "publish", tmp_path / "fewer", "s3://pictures/birds")
    again = [name for name in s3.written[before:] if name != ".published"]
    assert again == ["README.md", "dataset.json", "shard-00003.parquet"]  # the last one is removed
    rows = s3.python(
        "import datasets, s3fs; s3fs.S3FileSystem().get('pictures/birds', 'copy', recursive=True)\n"
        "from training.data.catalog import find_shards\n"
        "print(sum(find_shards('s3://pictures/birds').rows))".replace("'copy'", repr(str(tmp_path / "copy")))
    )
    assert rows.split()[-1] == "900"
    assert json.loads((tmp_path / "copy" / "dataset.json").read_text())["counts"]["kept"] == 900


def test_a_bucket_that_is_not_there_is_one_line_without_the_secret(s3, folder):
    said = s3.program("shards", "publish", folder, "s3://elsewhere/birds", code=2)
    assert said.startswith("error: s3://elsewhere/birds could not be written (")
    assert s3.secret not in said


@pytest.mark.long
def test_shards_go_to_the_hub_in_one_commit_and_a_killed_upload_continues(hub, folder):
    command = ["shards", "publish", str(folder), "hf://datasets/me/birds", "--license", "cc-by-4.0"]
    hub.server.hold_after = 2
    first = start(
        [*PROGRAM, *command], env=hub.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until(lambda: first.poll() is not None or (hub.server.held.is_set() and len(hub.server.uploads) == 2))
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert hub.server.repos["dataset", "me/birds"] == [{}]
    assert len(hub.server.uploads) == 2
    hub.server.hold_after = None
    said = hub.program(*command)
    assert len(hub.server.uploads) == len(set(hub.server.uploads)) == 4
    assert len(hub.server.repos["dataset", "me/birds"]) == 2
    assert hub.secret not in said
    files = hub.server.files("dataset", "me/birds")
    assert {name: files[name] for name in ("dataset.json", "shard-00001.parquet")} == {
        name: (folder / name).read_bytes() for name in ("dataset.json", "shard-00001.parquet")
    }
    card = files["README.md"].decode()
    assert 'license: "cc-by-4.0"' in card
    assert "| pictures | 1,200 |" in card
    assert "a" * 64 in card

    script = (
        "import datasets; rows = datasets.load_dataset('me/birds', split='train'); print(len(rows), rows[0]['caption'])"
    )
    length, *caption = hub.python(script).splitlines()[0].split()
    assert length == "1200"
    assert caption[0] == "a"


def test_who_is_not_let_in_reads_why_and_no_token(hub, folder):
    hub.environment["HF_TOKEN"] = "hf_AnotherToken0123456789"
    said = hub.program("shards", "publish", folder, "hf://datasets/me/birds", code=2)
    assert said.startswith("error: hf://datasets/me/birds: its storage refuses access (")
    assert "0123456789" not in said
