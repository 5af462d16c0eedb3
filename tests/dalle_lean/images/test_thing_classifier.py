"""A classifier folder is read as it was written, or refused by name."""

import json

import pytest
import torch
from PIL import Image

from dalle_lean.images.thing_classifier import READ_SIDE, ThingClassifier, picture_of_thing

THINGS = ["owl", "red heart", "tree"]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    ThingClassifier(THINGS, 32).save(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_a_classifier_read_back_scores_the_same(folder):
    pictures = [Image.new("RGB", (48, 48), colour) for colour in ("red", "blue")]
    scores = ThingClassifier.load(folder).scores(pictures)
    assert scores.shape == (2, 3)
    torch.manual_seed(0)
    assert torch.equal(scores, ThingClassifier(THINGS, 32).scores(pictures))


def test_things_have_rows(folder):
    assert ThingClassifier.load(folder).rows(["tree", "owl"]).tolist() == [2, 0]


def test_a_picture_of_any_size_is_looked_at_as_in_training():
    big = Image.new("RGB", (300, 300), "white")
    big.paste((200, 40, 40), (60, 60, 180, 240))
    small = big.resize((READ_SIDE, READ_SIDE), Image.Resampling.LANCZOS)
    assert torch.equal(picture_of_thing(big, 32), picture_of_thing(small, 32))


def test_weights_that_are_not_finite_are_refused(folder):
    classifier = ThingClassifier.load(folder)
    classifier.model.bn1.running_var[0] = torch.nan
    classifier.save(folder)
    with pytest.raises(ValueError, match=r"model\.safetensors: bn1\.running_var holds numbers that are not finite"):
        ThingClassifier.load(folder)


def test_weights_that_are_finite_only_in_float64_are_refused(folder):
    classifier = ThingClassifier.load(folder)
    classifier.model.double().conv1.weight.data[0] = 1e300
    classifier.save(folder)
    with pytest.raises(ValueError, match=r"conv1\.weight holds numbers that are not finite"):
        ThingClassifier.load(folder)


def test_a_cut_file_of_weights_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"not fully covered .*; get a complete copy"):
        ThingClassifier.load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        ThingClassifier.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not of the format dalle_lean_things/1"),
        ({"more": 1}, r"unknown or missing fields \['more'\]"),
        ({"things": "owl"}, "things must be a list of names"),
        ({"things": ["owl", "owl", "tree"]}, "3 names: must be 2..100000 different ones"),
        ({"picture_side": True}, "picture_side=True: must be a number of pixels"),
        ({"picture_side": 100_000}, r"picture_side=100000: must be in 32\.\.512"),
        ({"things": [*THINGS, "cat"]}, r"model\.safetensors: key fc\.\w+ has shape \[3"),
        ({"sha256": "0"}, "is not the file this classifier was saved with"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        ThingClassifier.load(folder)


def test_a_folder_of_something_else_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a classifier folder: it has no config"):
        ThingClassifier.load(tmp_path)
