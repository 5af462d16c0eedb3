"""Pictures of the run's fixed prompts, checkpoint after checkpoint."""

import itertools
import time

import pytest

pytest.importorskip("hivemind")

from PIL import Image

from tests.inference.tiny_model import save_tiny_model
from tests.training.swarm.observe.page.simulated import checkpoint
from training.run.recipe import load_recipe
from training.swarm.config import SwarmSection, SwarmSettings
from training.swarm.observe.page import gallery
from training.swarm.observe.page.gallery import (
    MOST_STEPS,
    Drawn,
    Gallery,
    Painter,
    heldout_prompts,
    read_gallery,
    spread,
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def no_lower_priority(monkeypatch):
    """Raise the priority: on a busy machine, the lowest one would never get CPU time."""
    monkeypatch.setattr(gallery, "LOW_PRIORITY", ())


def draw(painter, newest):
    """Poll until the drawing of `newest` has ended."""
    painter.poll(newest)
    if painter.process is not None:
        painter.process.wait(timeout=240)
    painter.poll(newest)


@pytest.mark.long
def test_each_checkpoint_draws_all_prompts_once(model_folder, tmp_path):
    notices = []
    prompts = ["a red heart", "--help", "a red heart on a white ground"]
    painter = Painter(tmp_path / "public", tmp_path / "drawing", lambda: prompts, notices.append)
    newest = checkpoint(model_folder.parent, 100)
    draw(painter, newest)
    assert notices == []
    [drawn] = read_gallery(tmp_path / "public").drawn
    assert (drawn.step, len(drawn.files)) == (100, 3)
    for name in drawn.files:
        with Image.open(tmp_path / "public" / name) as picture:
            assert picture.format == "WEBP"
            assert picture.width == picture.height
    again = Painter(tmp_path / "public", tmp_path / "drawing", lambda: pytest.fail("asked again"), notices.append)
    again.poll(newest)
    assert again.process is None
    assert again.gallery.prompts == prompts
    # Rolled back to step 50: later pictures are removed, and step 50 is drawn.
    draw(again, checkpoint(model_folder.parent, 50))
    assert [drawn.step for drawn in read_gallery(tmp_path / "public").drawn] == [50]
    assert len(list((tmp_path / "public").glob("*.webp"))) == 3
    again.close()
    assert not (tmp_path / "drawing").exists()


def test_a_checkpoint_that_cannot_be_drawn_with_is_said_once(tmp_path):
    notices = []
    painter = Painter(tmp_path / "public", tmp_path / "drawing", lambda: ["a red heart"], notices.append)
    for _ in range(2):
        draw(painter, checkpoint(tmp_path / "nothing", 100))
    [notice] = notices
    assert notice.startswith("no pictures of step 100: ")
    assert "nothing" in notice


def test_a_drawing_that_takes_too_long_is_ended(model_folder, tmp_path):
    notices = []
    painter = Painter(tmp_path / "public", tmp_path / "drawing", lambda: ["a red heart"], notices.append)
    painter.poll(checkpoint(model_folder.parent, 100))
    painter.due_s = time.monotonic()
    painter.poll(checkpoint(model_folder.parent, 100))
    assert painter.process is None
    assert notices[0].startswith("no pictures of step 100")


def test_the_first_and_the_newest_are_kept_and_others_evenly_between():
    drawn = []
    for step in range(1, 101):
        drawn = spread([*drawn, Drawn(step, [])])
    steps = [one.step for one in drawn]
    assert len(steps) == MOST_STEPS
    assert (steps[0], steps[-1]) == (1, 100)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps) <= 32


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "drawn-1-0.webp", "drawn-000001-0.html", "x.webp", "drawn-000001-0.webp\n"]
)
def test_names_of_pictures_lead_nowhere_else(name):
    with pytest.raises(ValueError, match="are malformed"):
        Gallery.parse(f'{{"prompts": [], "drawn": [{{"step": 1, "files": ["{name}"]}}]}}'.replace("\n", "\\n"))


def test_prompts_are_captions_that_nobody_trains_on_each_once(shards):
    recipe = load_recipe("tiny")
    settings = SwarmSettings(swarm=SwarmSection(data=str(shards)), recipe=recipe)
    prompts = heldout_prompts(settings)
    assert prompts == heldout_prompts(settings)
    assert 1 <= len(prompts) <= 6
    assert len(set(prompts)) == len(prompts)
