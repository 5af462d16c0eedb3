"""The whole way, as a user walks it: a VQGAN, codes, a transformer, a CLIP, a model folder, pictures."""

import json
from pathlib import Path

import pytest
from PIL import Image

from dalle_lean.cli import main
from dalle_lean.io.model_folder import check_parts

EMOJI = Path(__file__).parent / "data" / "emoji"


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    home = tmp_path_factory.mktemp("walk")
    vqgan = ("--steps", 6, "--batch-size", 8, "--picture-side", 32, "--codebook-size", 64, "--channels", 32)
    run("train-vqgan", EMOJI, home / "vqgan", *vqgan, "--code-width", 8, "--z-channels", 8)
    run("preprocess", EMOJI, home / "shards", "--vqgan", home / "vqgan")
    run("train", home / "shards", home / "run", "--config", "tiny", "--vqgan", home / "vqgan")
    clip = ("--steps", 4, "--batch-size", 16, "--picture-side", 32, "--width", 32)
    run("train-clip", EMOJI, home / "clip", *clip)
    run("pack", home / "run" / "model", home / "model", "--clip", home / "clip" / "clip", "--dtype", "bfloat16")
    return home


def test_the_walk_ends_in_a_complete_model_folder(model):
    parts = check_parts(model / "model")["parts"]
    folders = {Path(name).parent.name for name in parts}
    assert folders == {"", "vqgan", "clip"}
    info = json.loads((model / "shards" / "dataset.json").read_text())
    assert info["counts"]["kept"] == info["counts"]["seen"] - sum(info["counts"]["rejected"].values()) > 150
    samples = Image.open(next((model / "run" / "samples").glob("*.png")))
    assert samples.width > 32


def test_the_model_draws_the_same_pictures_again(model, tmp_path):
    asked = ("a red heart", "--model", model / "model", "--num-images", 6, "--best", 2, "--seed", 3)
    run("generate", *asked, "--out", tmp_path / "one")
    run("generate", *asked, "--out", tmp_path / "two", "--batch-size", 4)
    for name in ("00.png", "01.png", "contact_sheet.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    scores = [picture["score"] for picture in results["pictures"]]
    assert scores == sorted(scores, reverse=True)
    assert Image.open(tmp_path / "one" / "00.png").size == (32, 32)
