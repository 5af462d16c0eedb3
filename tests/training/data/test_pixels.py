"""Decoded pictures in a file: decoded once, as many as the disk holds."""

import hashlib
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from dalle_lean.errors import UserError
from training.data.image_text import read_captioned, read_picture, read_pictures
from training.data.pixels import Pixels, fingerprint, in_file

SIDE = 4


def pictures(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def test_chosen_and_replaced_pictures_are_those_of_a_tensor():
    stored, others = pictures(10), pictures(3, seed=1)
    places = torch.tensor([7, 0, 5])
    expected = stored.flip(0).index_copy(0, places, others)
    found = Pixels(stored).take(torch.arange(9, -1, -1)).replaced(places, others)
    assert torch.equal(found[:], expected)
    assert torch.equal(found[[7, 7, 1]], expected[[7, 7, 1]])
    assert torch.equal(found[2:9:3], expected[2:9:3])
    mask = torch.arange(10) % 3 == 0
    assert torch.equal(found.take(mask)[:], expected[mask])
    assert found.digest(b"x") == hashlib.sha256(b"x" + expected.numpy().tobytes()).hexdigest()
    assert len(found) == 10


def counting(filled, content):
    def fill(pixels):
        filled.append(len(pixels))
        pixels[:] = content
        return {"used": list(range(len(pixels)))}

    return fill


def test_a_later_call_finds_what_was_made_from_the_same(tmp_path, caplog):
    caplog.set_level("INFO", "training")
    filled, content = [], pictures(5)
    for made_from in ("one", "one", "another", "another"):
        found, facts = in_file(tmp_path / "p.npy", made_from, 5, SIDE, counting(filled, content))
        assert torch.equal(found, content)
        assert facts == {"used": [0, 1, 2, 3, 4]}
    assert len(filled) == len(caplog.messages) == 2
    assert caplog.messages[0].startswith(f"decoding into {tmp_path / 'p.npy'}: 5 pictures of 4x4 pixels take 240 B, ")
    os.unlink(tmp_path / "p.json")  # a kill just before it was written
    in_file(tmp_path / "p.npy", "another", 5, SIDE, counting(filled, content))
    assert len(filled) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "p.npy"]


def test_what_is_written_to_found_pictures_stays_out_of_the_file(tmp_path):
    for _ in range(2):
        found, _ = in_file(tmp_path / "p.npy", "one", 5, SIDE, counting([], pictures(5)))
    found[:] = 0
    assert np.array_equal(np.load(tmp_path / "p.npy"), pictures(5).numpy())


def test_a_system_that_cannot_reserve_space_keeps_pictures_in_a_file_too(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)  # as on macOS
    for _ in range(2):
        found, _ = in_file(tmp_path / "p.npy", "one", 5, SIDE, counting([], pictures(5)))
        assert torch.equal(found, pictures(5))


def test_pictures_that_the_disk_has_no_room_for_are_refused_before_any_is_decoded(tmp_path):
    filled = []
    with pytest.raises(UserError, match=r"1,000,000,000 pictures of 4096x4096 pixels take 50.3 PB, .* are free"):
        in_file(tmp_path / "p.npy", "one", 10**9, 4096, counting(filled, 0))
    assert not filled
    assert not list(tmp_path.iterdir())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = []
    for number in range(6):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": f"number {number}"}))
    (folder / "3.png").write_bytes(b"broken")
    (folder / "metadata.jsonl").write_text("\n".join([*lines[:2], "no JSON", *lines[2:]]))
    return folder


def test_captions_and_pictures_are_those_of_the_folder_the_second_time_too(folder, tmp_path):
    numbers = [0, 1, 2, 4, 5]
    plain = torch.stack([read_picture(folder, f"{number}.png", SIDE) for number in numbers])
    for _ in range(2):
        captioned = read_captioned(folder, SIDE, store=tmp_path / "p.npy")
        assert captioned.captions == [f"number {number}" for number in numbers]
        assert captioned.skipped == {"line is not JSON": 1, "picture broken": 1}
        assert torch.equal(captioned.pixels[:], plain)
        pictures = read_pictures(folder, SIDE, store=tmp_path / "q.npy")
        assert pictures.skipped == {"picture broken": 1}
        assert torch.equal(pictures.pixels[:], plain)


def test_no_picture_is_in_no_file(tmp_path):
    found, facts = in_file(tmp_path / "p.npy", "nothing", 0, SIDE, counting([], 0))
    assert found.shape == (0, 3, SIDE, SIDE)
    assert facts == {"used": []}
    assert not list(tmp_path.iterdir())


def test_a_changed_picture_is_decoded_again(folder, tmp_path):
    before = read_captioned(folder, SIDE, store=tmp_path / "p.npy").pixels[:]
    time.sleep(0.01)
    Image.new("RGB", (8, 8), "white").save(folder / "1.png")
    after = read_captioned(folder, SIDE, store=tmp_path / "p.npy").pixels[:]
    assert (before != after).flatten(1).any(dim=1).tolist() == [False, True, False, False, False]
    assert fingerprint(folder, ["1.png"], 4) != fingerprint(folder, ["1.png"], 5)
    assert fingerprint(folder, ["not there", "\0", "x" * 5000]) == fingerprint(folder, ["not there", "\0", "x" * 5000])


@pytest.mark.long
def test_more_pictures_than_the_memory_holds_can_be_read(folder, tmp_path):
    (folder / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "one"}\n' * 100)
    script = f"""
import re, resource
from pathlib import Path
from training.data.image_text import read_captioned, read_pictures
kilobytes = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
limit = 1024 * kilobytes + 150_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
data = read_captioned(Path({str(folder)!r}), 1024, store=Path({str(tmp_path / "p.npy")!r}))
print(len(data), data.pixels[[5, 99]].shape)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert result.stdout == "100 torch.Size([2, 3, 1024, 1024])\n", result.stderr  # 315 MB
