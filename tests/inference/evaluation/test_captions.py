"""Listings and pictures may come from anyone: each is right or refused by name, and nothing outside is opened."""

import json

import numpy as np
import pytest
from PIL import Image

from inference.evaluation.captions import drawing_path, match_kinds, open_pixels, read_lines, read_pixels, sample
from tests.inference.evaluation.drawings import line

GOOD = {"file_name": "a.png", **line("a ball")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "metadata.jsonl, line 1: line is not JSON"),
        ("[1]", "line 1: no file_name"),
        ('{"text": "a cat"}', "line 1: no file_name"),
        ('{"file_name": "a.png", "text": null}', "line 1: no text"),
        ('{"file_name": "a.png", "text": " "}', "line 1: no text"),
        (json.dumps(GOOD) + '\n{"file_name": 5, "text": "a cat"}', "line 2: no file_name"),
        (json.dumps(GOOD | {"things": []}), "line 1: things must be a list of names"),
        (json.dumps(GOOD | {"things": [" "]}), "line 1: things must be a list of names"),
        (json.dumps(GOOD | {"size": 3}), "line 1: size must be text, or null"),
        (json.dumps({name: GOOD[name] for name in GOOD if name != "place"}), "line 1: place must be text, or null"),
        (json.dumps(GOOD | {"kind": None}), "line 1: kind must be text"),
        (json.dumps(GOOD | {"kind": "painted-pair"}), "line 1: paints must be a list"),
        (json.dumps(GOOD | {"kind": "painted-count", "count": "3"}), "line 1: count must be a whole number"),
    ],
)
def test_a_broken_listing_is_named(tmp_path, content, message):
    (tmp_path / "metadata.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_lines(tmp_path)


@pytest.mark.parametrize("name", ["../a.png", "/etc/passwd"])
def test_a_picture_outside_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="file_name points outside the folder"):
        drawing_path(tmp_path, {"file_name": name})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "picture missing"),
        (b"noise", "picture broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "broken"),
    ],
)
def test_a_picture_that_is_none_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.png: .*{message}"):
        open_pixels(tmp_path / "a.png")


def test_pictures_are_read_at_the_side_that_is_asked_for(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (open_pixels(tmp_path / "a.png") == pixels).all()
    assert read_pixels([tmp_path / "a.png"] * 2, 8).shape == (2, 3, 8, 8)


def test_the_first_few_of_a_sample_are_a_sample():
    chosen = sample(range(1000), 100, "0")
    assert len({*chosen}) == 100
    assert chosen != sorted(chosen)
    assert sample(range(1000), 40, "0") == chosen[:40]


def test_kinds_are_chosen_in_the_same_shares():
    lines = [{"kind": kind} for kind in "aaaaaabbc"]
    like = [{"kind": kind} for kind in "aabbb"]
    assert [lines[row]["kind"] for row in match_kinds(lines, like)] == ["a", "b", "b"]
    assert match_kinds([{}, {}], [{}]) == [0, 1]
    assert match_kinds(lines, [{"kind": "d"}]) == list(range(9))
    assert len(match_kinds([{"kind": "a"}] * 49 + [{"kind": "b"}], [{"kind": "b"}] * 49)) == 1
