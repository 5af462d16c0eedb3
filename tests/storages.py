"""An S3 server and a hub on loopback, as the programs that publish to them and fetch from them see them."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from tests.children import PROGRAM
from tests.hub import TOKEN

ROOT = Path(__file__).parents[1]
PATIENCE_S = 400


def run(environment, *command, code=0):
    """What a command says, which is to end with this code."""
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Storage:
    """One of the two.

    secret: which no output may show.
    model: a destination for a model folder.
    environment: of a program that uses it.
    """

    secret: str
    model: str
    environment: dict[str, str]

    def program(self, *arguments, code=0):
        """What `dalle-lean` says."""
        return run(self.environment, *PROGRAM, *map(str, arguments), code=code)

    def python(self, script):
        return run(self.environment, sys.executable, "-c", script)


class S3(Storage):
    """moto's server as a process, with a bucket."""

    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
    model = "s3://pictures/model"

    def __init__(self, folder):
        self.log, self.hold, self.down = folder / "log", folder / "hold", folder / "down"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        command = [sys.executable, str(ROOT / "tests" / "s3_server.py"), *map(str, (self.log, self.hold, self.down))]
        with open(folder / "server.txt", "w") as output:
            self.process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        until(lambda: self.process.poll() is not None or (self.log.exists() and self.log.read_text()))
        self.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self.log.read_text().split()[0]}"
        self.python("import s3fs; s3fs.S3FileSystem().mkdir('pictures')")

    def written(self):
        """The keys of the requests that write, in their order, without their folders."""
        return [line.rpartition("/")[2] for line in self.log.read_text().splitlines()[1:]]

    def weight_files(self):
        """How many files of weights were sent in all."""
        return sum(name.endswith(".safetensors") for name in self.written())

    def fetch(self, folder):
        """The model as a client gets it."""
        self.python(f"import s3fs; s3fs.S3FileSystem().get('pictures/model', {str(folder)!r}, recursive=True)")
        return folder

    @contextmanager
    def away(self):
        self.down.touch()
        try:
            yield
        finally:
            self.down.unlink()

    @contextmanager
    def held(self, weight_file):
        """This file of a model does not arrive. Yields a function that says whether it is held."""
        self.hold.write_text(weight_file)
        try:
            yield lambda: f"/{weight_file}\n" in self.log.read_text()
        finally:
            self.hold.unlink()


class HubStorage(Storage):
    """The hub's client and a hub that it sees."""

    secret = TOKEN
    model = "hf://me/model"

    def __init__(self, hub, folder):
        self.server = hub
        self.environment = os.environ | {"PYTHONPATH": str(ROOT)} | hub.environment(folder)

    def weight_files(self):
        """How many files of weights were sent in all."""
        return len(self.server.uploads)

    def fetch(self, folder):
        """The model as a client gets it."""
        self.python(f"import huggingface_hub as hub; hub.snapshot_download('me/model', local_dir={str(folder)!r})")
        return folder

    @contextmanager
    def away(self):
        self.server.down = True
        try:
            yield
        finally:
            self.server.down = False

    @contextmanager
    def held(self, _):
        """The second file of weights does not arrive. Yields a function that says whether it is held."""
        self.server.hold_after = 1
        try:
            yield lambda: self.server.held.is_set() and len(self.server.uploads) == 1
        finally:
            self.server.hold_after = None
