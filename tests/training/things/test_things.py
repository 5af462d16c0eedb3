"""A classifier learns which thing is drawn, from drawings whose listing names it."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from dalle_lean.images.image_folder import Unusable
from dalle_lean.images.thing_classifier import ThingClassifier
from tests.preprocessing.runs import run_command
from tests.training.picture_runs import cut_after, killed_after, metrics, train_on_pictures
from training.data.augmentation import augment
from training.run.progress import TrainingDiverged
from training.things.recipe import ThingRecipe
from training.things.run import ThingRun, only_thing, read_things

train_things = partial(train_on_pictures, ThingRun)
TINY = {"picture_side": 32, "steps": 120, "batch_size": 8, "precision": "fp32", "lr": 2e-3}
SHAPES = ("ball", "bar", "frame")


def draw(shape, colour, ground, left, top, size):
    picture = Image.new("RGB", (128, 128), ground)
    brush = ImageDraw.Draw(picture)
    box = (left, top, left + size, top + size)
    if shape == "ball":
        brush.ellipse(box, fill=colour)
    elif shape == "bar":
        brush.rectangle((left, top, left + size, top + size // 4), fill=colour)
    else:
        brush.rectangle(box, outline=colour, width=max(2, size // 8))
    return picture


def write_folder(folder, colours, count=96):
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for row in range(count):
        shape = SHAPES[row % 3]
        colour, ground = rng.permutation(colours)[:2]
        left, top = rng.integers(4, 56, size=2).tolist()
        draw(shape, str(colour), str(ground), left, top, int(rng.integers(32, 64))).save(folder / f"{row}.png")
        lines.append({"file_name": f"{row}.png", "text": f"a {shape}", "things": [shape]})
    return folder, lines


def write_lines(folder, lines):
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, lines = write_folder(tmp_path_factory.mktemp("things") / "train", ("red", "blue", "white"))
    lines.append({"file_name": "0.png", "text": "two", "things": ["ball", "bar"]})
    lines.append({"file_name": "0.png", "text": "none told"})
    lines.append({"file_name": "missing.png", "text": "a ball", "things": ["ball"]})
    write_lines(folder, lines)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder, lines = write_folder(tmp_path_factory.mktemp("things") / "heldout", ("green", "yellow", "black"))
    write_lines(folder, [*lines, {"file_name": "0.png", "text": "a cube", "things": ["cube"]}])
    return folder


@pytest.mark.slow
def test_it_tells_things_in_colours_and_on_grounds_it_never_saw(folder, other, tmp_path):
    end = train_things(folder, tmp_path, ThingRecipe(**TINY), heldout=other)
    assert end.step == 120
    assert end.measured["right_thing_first"] > 2 / 3  # chance is a third; machines round differently
    assert end.among == {"right_thing_first": 3}
    assert end.unusable == {"not exactly one thing": 1, "no things named": 1, "picture missing": 1}
    classifier = ThingClassifier.load(tmp_path / "classifier")
    assert classifier.things == ("ball", "bar", "frame")
    known = read_things(other, 32, store=tmp_path / "other.npy")
    rows = [row for row, thing in enumerate(known.captions) if thing != "cube"]
    pictures = [Image.open(other / f"{row}.png") for row in rows]
    assert torch.equal(classifier.scores(pictures), classifier.scores_of_pixels(known.pixels[rows]))


@pytest.mark.slow
def test_a_killed_run_continues_exactly_where_its_checkpoint_stood(folder, tmp_path):
    recipe = ThingRecipe(**{**TINY, "steps": 8, "checkpoint_every": 4, "log_every": 1, "precision": "bf16"})
    killed_after(5, ThingRun, folder, tmp_path / "killed", recipe)
    train_things(folder, tmp_path / "killed", recipe)
    train_things(folder, tmp_path / "whole", recipe)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    killed, whole = (ThingClassifier.load(tmp_path / name / "classifier") for name in ("killed", "whole"))
    weights = whole.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in killed.model.state_dict().items())


def test_a_run_whose_time_is_up_leaves_a_classifier_and_goes_on_to_the_same_one(folder, tmp_path, clock):
    recipe = ThingRecipe(**{**TINY, "steps": 6, "log_every": 1})
    assert cut_after(3, clock, ThingRun, folder, tmp_path / "cut", recipe).step == 3
    assert ThingClassifier.load(tmp_path / "cut/classifier").things == SHAPES
    train_things(folder, tmp_path / "cut", recipe, max_minutes=1)
    train_things(folder, tmp_path / "whole", recipe)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_things_are_cut_out_once_into_files_that_later_calls_map(folder, other, tmp_path, caplog):
    recipe = ThingRecipe(**{**TINY, "steps": 1})
    train_things(folder, tmp_path, recipe, heldout=other)
    kept = np.load(tmp_path / "pictures.npy", mmap_mode="r")
    assert np.array_equal(kept[:96], read_things(folder, 32, store=tmp_path / "again.npy").pixels[:].numpy())
    files = [tmp_path / f"{name}.npy" for name in ("pictures", "heldout")]
    before = [file.stat().st_mtime_ns for file in files]
    caplog.set_level("INFO", "training")
    caplog.clear()
    train_things(folder, tmp_path, recipe, heldout=other)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert caplog.messages == ["already finished at step 1"]


def test_a_name_is_one_thing_whatever_blanks_stand_around_it():
    assert only_thing({"things": [" owl "]}) == "owl"
    with pytest.raises(Unusable, match="a name that cannot be printed"):
        only_thing({"things": ["owl\ud800"]})


def test_one_thing_alone_cannot_be_told_apart(tmp_path):
    only, lines = write_folder(tmp_path / "only", ("red", "blue"), count=1)
    write_lines(only, lines)
    with pytest.raises(ValueError, match="shows only 'ball'; at least two things are needed"):
        train_things(only, tmp_path / "out", ThingRecipe(**TINY))


def test_a_step_that_is_not_finite_changes_nothing_and_too_many_end_the_run(folder, tmp_path, monkeypatch):
    recipe = ThingRecipe(**{**TINY, "max_skipped_in_row": 2})
    run = ThingRun(folder, tmp_path / "run", recipe)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    monkeypatch.setattr("training.things.run.augment", lambda pixels, generator: pixels * torch.nan)
    assert not np.isfinite(run.step(1, torch.arange(8))["loss"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())
    with pytest.raises(TrainingDiverged, match="2 steps in a row"):
        train_things(folder, tmp_path, recipe)


def test_augmentation_keeps_the_thing_and_follows_the_seed():
    pixels = torch.zeros(16, 3, 32, 32)
    pixels[:, :, 8:24, 8:24] = 255
    drawn, again, other = (augment(pixels, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert drawn.shape == pixels.shape
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)
    assert (drawn[:, :, 13:19, 13:19].mean(dim=(1, 2, 3)) > drawn[:, :, :2].mean(dim=(1, 2, 3)) + 60).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"warmup_share": 1.5}, r"warmup_share=1\.5: must be a finite number of at least 0 and below 1"),
        ({"picture_side": 20_000}, r"picture_side=20000: must be in 32\.\.512"),
        ({"heldout_every": 0}, "heldout_every=0: must be a whole number of at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every=0: must be a whole number of at least 1"),
    ],
)
def test_a_recipe_out_of_range_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        ThingRecipe(**setting)


def test_a_folder_that_names_no_things_is_refused_in_one_line(tmp_path, capsys):
    write_lines(tmp_path, [{"file_name": "0.png", "text": "a ball"}])
    assert run_command("train-things", tmp_path, tmp_path / "out") == 2
    assert "has no usable line: {'no things named': 1}" in capsys.readouterr().err


def test_a_heldout_folder_of_other_things_is_refused(folder, tmp_path):
    strange, lines = write_folder(tmp_path / "strange", ("red", "blue"), count=2)
    write_lines(strange, [{**line, "things": ["cube"]} for line in lines])
    with pytest.raises(ValueError, match="shows none of the 3 things that are learnt"):
        train_things(folder, tmp_path / "out", ThingRecipe(**TINY), heldout=strange)
