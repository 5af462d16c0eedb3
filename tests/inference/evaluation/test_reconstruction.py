"""A tokenizer whose codes see one window of pixels gives a thing the same codes on any ground."""

from PIL import Image

from inference.evaluation.evaluate import to_pixels
from inference.evaluation.reconstruction import kept_on_other_ground
from tests.inference.evaluation.drawings import discs
from tests.tiny import tiny_vqgan


def test_codes_stay_where_their_window_shows_no_ground():
    drawn = Image.new("RGB", (64, 64), "white")
    drawn.paste("red", (16, 16, 48, 48))
    pixels = to_pixels([drawn])

    def kept(window):
        vqgan = tiny_vqgan(encoder_window=window, codebook_size=4096)
        return kept_on_other_ground(vqgan, pixels, vqgan.encode(pixels / 255))

    assert kept(8) == 1
    assert kept(24) < 0.5  # the ground is in twelve of the sixteen windows


def test_without_a_patch_that_a_thing_covers_there_is_no_share():
    pixels = to_pixels([discs("white", ("red", 0.55, 0.1))])
    vqgan = tiny_vqgan()
    assert kept_on_other_ground(vqgan, pixels, vqgan.encode(pixels / 255)) is None
