"""An S3 server and a hub on loopback, as the programs that publish to them and fetch from them see them."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.children import PROGRAM
from tests.hub import TOKEN
from tests.serving import serving

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
    """moto's server, with a bucket."""

    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
    model = "s3://pictures/model"

    def __init__(self):
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.written = []
        """The keys of the requests that write, in their order, without their folders, each before it is served."""
        self.held_name, self.holds, self.down = None, threading.Event(), False
        self.server = make_server("127.0.0.1", 0, self.answer, threaded=True)
        url = f"http://127.0.0.1:{self.server.port}"
        client = {"key": "AKIAIOSFODNN7EXAMPLE", "secret": self.secret, "endpoint_url": url}
        self.client = s3fs.S3FileSystem(**client, skip_instance_cache=True)
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": client["key"],
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_ENDPOINT_URL": url,
        }

    def answer(self, environ, start_response):
        if self.down:
            start_response("503 Service Unavailable", [])
            return [b""]
        if environ["REQUEST_METHOD"] in ("PUT", "DELETE", "POST"):
            self.written.append(environ["PATH_INFO"].rpartition("/")[2])
            while self.held_name is not None and environ["PATH_INFO"].endswith(self.held_name):
                self.holds.set()
                time.sleep(0.05)
        return self.moto(environ, start_response)

    @contextmanager
    def serving(self):
        with serving(self.server):
            self.client.mkdir("pictures")
            self.written.clear()
            try:
                yield self
            finally:
                self.held_name = None
                self.client.rm("pictures", recursive=True)  # moto keeps it, whichever server is asked

    def weight_files(self):
        """How many files of weights were sent in all."""
        return sum(name.endswith(".safetensors") for name in self.written)

    def fetch(self, folder):
        """The model as a client gets it."""
        self.client.invalidate_cache()
        self.client.get("pictures/model", str(folder), recursive=True)
        return folder

    @contextmanager
    def away(self):
        self.down = True
        try:
            yield
        finally:
            self.down = False

    @contextmanager
    def held(self, name):
        """This file of a model does not arrive. Yields a function that says whether it is held."""
        self.held_name = name
        self.holds.clear()
        try:
            yield self.holds.is_set
        finally:
            self.held_name = None


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
