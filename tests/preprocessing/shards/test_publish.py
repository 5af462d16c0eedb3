"""`dalle-lean shards publish` to an S3 server and to a hub, both on loopback, by real clients."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.children import PROGRAM, start
from tests.hub import TOKEN, loopback_hub
from tests.training.conftest import write_shards

ROOT = Path(__file__).parents[3]
SIZES = {"rows": 1200, "shard_rows": 300, "image_side": 16}
"""Four shards, each of which outweighs the note of what has arrived."""
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
PATIENCE_S = 400


@pytest.fixture
def folder(tmp_path):
    return write_shards(tmp_path / "birds", **SIZES)


def run(environment, *command, code=0):
    """What a command says, which is to end with this code."""
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def publish(environment, folder, destination, *options, code=0):
    return run(environment, *PROGRAM, "shards", "publish", str(folder), destination, *options, code=code)


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class S3:
    """moto's server as a process, with a bucket."""

    def __init__(self, folder):
        self.log, self.hold = folder / "log", folder / "hold"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        command = [sys.executable, str(ROOT / "tests" / "s3_server.py"), str(self.log), str(self.hold)]
        with open(folder / "server.txt", "w") as output:
            self.process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        until(lambda: self.log.exists() and self.log.read_text())
        self.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self.log.read_text().strip()}"

    def written(self):
        """The keys of the requests that write, in their order."""
        return [line.rpartition("/")[2] for line in self.log.read_text().splitlines()[1:]]

    def python(self, script):
        return run(self.environment, sys.executable, "-c", script)


@pytest.fixture
def s3(tmp_path):
    (tmp_path / "s3").mkdir()
    server = S3(tmp_path / "s3")
    server.python("import s3fs; s3fs.S3FileSystem().mkdir('pictures')")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.slow
def test_shards_go_to_a_bucket_and_a_killed_copy_continues(s3, folder, tmp_path):
    s3.hold.touch()
    first = start(
        [*PROGRAM, "shards", "publish", str(folder), "s3://pictures/birds"],
        env=s3.environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: "shard-00002.parquet" in s3.written())
    first.send_signal(signal.SIGKILL)
    first.wait()
    s3.hold.unlink()
    before = len(s3.written())
    said = publish(s3.environment, folder, "s3://pictures/birds")
    again = [name for name in s3.written()[before:] if name != ".published"]
    assert again == ["shard-00002.parquet", "shard-00003.parquet", "README.md", "dataset.json"]
    assert "4 files sent, 2 were there" in said
    assert SECRET not in said

    write_shards(tmp_path / "fewer", **SIZES | {"rows": 900})
    before = len(s3.written())
    publish(s3.environment, tmp_path / "fewer", "s3://pictures/birds")
    again = [name for name in s3.written()[before:] if name != ".published"]
    assert again == ["README.md", "dataset.json", "shard-00003.parquet"]  # the last one is removed
    rows = s3.python(
        "import datasets, s3fs; s3fs.S3FileSystem().get('pictures/birds', 'copy', recursive=True)\n"
        "from training.data.catalog import find_shards\n"
        "print(sum(find_shards('s3://pictures/birds').rows))".replace("'copy'", repr(str(tmp_path / "copy")))
    )
    assert rows.split()[-1] == "900"
    assert json.loads((tmp_path / "copy" / "dataset.json").read_text())["counts"]["kept"] == 900


def test_a_bucket_that_is_not_there_is_one_line_without_the_secret(s3, folder):
    said = publish(s3.environment, folder, "s3://elsewhere/birds", code=2)
    assert said.startswith("error: s3://elsewhere/birds could not be written (")
    assert SECRET not in said


@pytest.fixture
def hub(tmp_path):
    with loopback_hub() as hub:
        hub.client = os.environ | {"PYTHONPATH": str(ROOT)} | hub.environment(tmp_path / "home")
        yield hub


def test_shards_go_to_the_hub_in_one_commit_and_a_killed_upload_continues(hub, folder):
    command = ["shards", "publish", str(folder), "hf://datasets/me/birds", "--license", "cc-by-4.0"]
    hub.hold_after = 2
    first = start([*PROGRAM, *command], env=hub.client, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: first.poll() is not None or (hub.held.is_set() and len(hub.uploads) == 2))
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert hub.repos["dataset", "me/birds"] == [{}]
    assert len(hub.uploads) == 2
    hub.hold_after = None
    said = run(hub.client, *PROGRAM, *command)
    assert len(hub.uploads) == len(set(hub.uploads)) == 4
    assert len(hub.repos["dataset", "me/birds"]) == 2
    assert TOKEN not in said
    files = hub.files("dataset", "me/birds")
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
    length, *caption = run(hub.client, sys.executable, "-c", script).splitlines()[0].split()
    assert length == "1200"
    assert caption[0] == "a"


def test_who_is_not_let_in_reads_why_and_no_token(hub, folder):
    stranger = hub.client | {"HF_TOKEN": "hf_AnotherToken0123456789"}
    said = publish(stranger, folder, "hf://datasets/me/birds", code=2)
    assert said.startswith("error: hf://datasets/me/birds: its storage refuses access (")
    assert "0123456789" not in said
