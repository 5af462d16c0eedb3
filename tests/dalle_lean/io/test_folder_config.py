"""A folder of another kind than asked for is named in one line, with the right one where it can be seen."""

import re
from pathlib import Path

import pytest

from dalle_lean.clip.scorer import read_clip_config
from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import write_json
from dalle_lean.io.model_folder import check_parts, find_model
from training.run.subjects import recipe_of_folder

FORMATS = {
    "clip": "dalle_lean_clip/1",
    "vqgan": "dalle_lean_vqgan/1",
    "model": "dalle_lean_model/1",
    "classifier": "dalle_lean_things/1",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a model, and runs of every kind, of which only config.json is there."""
    monkeypatch.chdir(tmp_path)
    for folder, kind in (
        ("birds", "model"),
        ("birds/vqgan", "vqgan"),
        ("birds/clip", "clip"),
        ("run/model", "model"),
        ("run/model/vqgan", "vqgan"),
        ("hosted/checkpoints/step-000020/model", "model"),
        ("hosted/checkpoints/step-000100/model", "model"),
        ("clip-run/clip", "clip"),
        ("things-run/classifier", "classifier"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        write_json(tmp_path / folder / "config.json", {"format": FORMATS[kind]})
    (tmp_path / "empty").mkdir()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("load", "folder", "said"),
    [
        (VQGAN.load, "nope", "there is no folder nope; name a VQGAN folder"),
        (
            VQGAN.load,
            "birds/vqgn",
            "there is no folder birds/vqgn (did you mean birds/vqgan?); name a VQGAN folder",
        ),
        (VQGAN.load, "empty", "empty is not a VQGAN folder: it has no config.json"),
        (VQGAN.load, "birds", "birds is a model folder, not a VQGAN folder; did you mean birds/vqgan?"),
        (VQGAN.load, "birds/clip", "birds/clip is a CLIP folder, not a VQGAN folder"),
        (
            VQGAN.load,
            "run",
            "run is not a VQGAN folder: it has no config.json; did you mean run/model/vqgan?",
        ),
        (find_model, "run", "run is not a model folder: it has no config.json; did you mean run/model?"),
        (
            find_model,
            "hosted",
            "hosted is not a model folder: it has no config.json; did you mean hosted/checkpoints/step-000100/model?",
        ),
        (check_parts, "birds/vqgan", "birds/vqgan is a VQGAN folder, not a model folder; did you mean birds?"),
        (
            recipe_of_folder,
            "run",
            "run is not a model folder: it has no config.json; did you mean run/model?",
        ),
        (
            read_clip_config,
            "clip-run",
            "clip-run is not a CLIP folder: it has no config.json; did you mean clip-run/clip?",
        ),
        (
            ThingClassifier.load,
            "things-run",
            "things-run is not a classifier folder: it has no config.json; did you mean things-run/classifier?",
        ),
    ],
)
def test_a_folder_of_another_kind_leads_to_the_right_one(load, folder, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        load(folder if load is find_model else Path(folder))


@pytest.mark.usefixtures("home")
def test_a_format_of_another_version_is_named(tmp_path):
    write_json(tmp_path / "birds/config.json", {"format": "dalle_lean_model/9"})
    with pytest.raises(UserError, match=r"birds/config\.json is not of the format dalle_lean_model/1"):
        check_parts("birds")
