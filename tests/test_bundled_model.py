"""What is shipped in models/emoji: small enough for a checkout, drawn with by everybody."""

import pytest

from dalle_lean.io.model_folder import bundled_model
from inference import Generator
from inference.evaluation.pixels import ground_colour
from inference.request import Request, Settings

LIMIT_BYTES = 60_000_000
LARGEST_FILE_BYTES = 25_000_000


@pytest.fixture(scope="module")
def bundled():
    return Generator.from_folder(bundled_model(), device="cpu", precision="fp32")


def test_all_parts_are_small_enough_for_a_checkout():
    sizes = [path.stat().st_size for path in bundled_model().rglob("*") if path.suffix in (".json", ".safetensors")]
    assert max(sizes) <= LARGEST_FILE_BYTES
    assert sum(sizes) <= LIMIT_BYTES


def test_the_card_tells_the_parameters_of_every_part(bundled):
    card = (bundled_model() / "README.md").read_text()
    for part in (bundled.model, bundled.vqgan, bundled.scorer.model):
        assert f"{sum(parameter.numel() for parameter in part.parameters()):,}" in card


def test_the_ground_has_the_colour_that_is_asked_for(bundled):
    colours = ["yellow", "blue", "pink"]
    asked = [Request(f"an apple on a {colour} background", Settings(num_images=1, best=1)) for colour in colours]
    drawn = [progress for progress in bundled.draw(asked) if progress.pictures is not None]
    assert len(drawn) == len(colours)
    for progress in drawn:
        (picture,) = progress.pictures
        assert picture.image.size == (bundled.picture_side, bundled.picture_side)
        assert ground_colour(picture.image) == colours[progress.request]
