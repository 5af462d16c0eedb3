"""A small folder of pictures with captions, and a tiny VQGAN."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from preprocessing.encoding.worker_protocol import from_bytes, to_bytes
from tests.tiny import tiny_vqgan

COLOURS = ("red", "green", "blue", "orange", "purple", "black")


@pytest.fixture(autouse=True)
def _one_decoder(monkeypatch):
    """Runs that choose no number of decoding processes start one, since each takes as long as all of a small run."""
    monkeypatch.setattr("preprocessing.encoding.encode.MAX_WORKERS", 1)


class DecoderHere:
    """A worker that decodes in this process, through the same protocol: starting one takes longer than a small run."""

    def __init__(self, decoding, memory_bytes, cpu_limit_s):
        self.decoding = decoding

    def decode(self, samples):
        for sample in samples:
            yield from_bytes(to_bytes(self.decoding(sample)), sample, self.decoding)

    def kill(self):
        pass


@pytest.fixture
def decode_here(monkeypatch):
    monkeypatch.setattr("preprocessing.encoding.decode_pool.DecodeWorker", DecoderHere)


@pytest.fixture(scope="session")
def emoji():
    """200 real pictures with captions."""
    return Path(__file__).parents[1] / "data" / "emoji"


@pytest.fixture
def discs(tmp_path):
    """30 coloured discs of differing sizes, listed in metadata.jsonl, to be spoilt at will."""
    folder = tmp_path / "discs"
    folder.mkdir()
    lines = []
    for index in range(30):
        colour = COLOURS[index % len(COLOURS)]
        image = Image.new("RGB", (24 + index % 7, 24), "white")
        ImageDraw.Draw(image).ellipse((2, 2, 12 + index % 9, 12 + index % 11), fill=colour)
        image.save(folder / f"{index:03d}.png")
        lines.append(json.dumps({"file_name": f"{index:03d}.png", "text": f"a {colour} disc, number {index}"}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def unreadable(monkeypatch):
    """Lets reading a whole file fail as on a bad disk: its footer is read, and the error names no file."""
    digest = hashlib.file_digest

    def spoil(name):
        def read(file, algorithm):
            if Path(file.name).name == name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return digest(file, algorithm)

        monkeypatch.setattr(hashlib, "file_digest", read)

    return spoil


@pytest.fixture(scope="session")
def vqgan():
    return tiny_vqgan(codebook_size=64, picture_side=16)


@pytest.fixture(scope="session")
def vqgan_folder(vqgan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vqgan")
    vqgan.save(folder)
    return folder
