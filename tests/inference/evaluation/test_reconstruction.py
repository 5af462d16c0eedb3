"""A tokenizer whose codes see one window of pixels gives a thing the same codes on any ground."""

import torch
from PIL import Image

from inference.evaluation.evaluate import to_pixels
from inference.evaluation.reconstruction import kept_on_other_ground
from tests.inference.evaluation.drawings import discs
from tests.tiny import tiny_vqgan


def pictures(*drawn: Image.Image) -> torch.Tensor:
    return to_pixels(drawn)


def test_codes_stay_where_their_window_shows_no_ground():
    drawn = Image.new("RGB", (64, 64), "white")
    drawn.paste("red", (16, 16, 48, 48))

    def kept(window):
        vqgan = tiny_vqgan(encoder_window=window, codebook_size=4096)
        return kept_on_other_ground(vqgan, pictures(drawn), vqgan.encode(pictures(drawn) / 255))

    assert kept(8) == 1
    assert kept(24) < 0.5  # the ground is in twelve of the sixteen windows


def test_without_a_patch_that_a_thing_covers_there_is_no_share():
    drawn = pictures(discs("white", ("red", 0.55, 0.1)))
    vqgan = tiny_vqgan()
    assert kept_on_other_ground(vqgan, drawn, vqgan.encode(drawn / 255)) is None
