"""What stands on a plain ground is found and cut out."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from dalle_lean.images.ground import cut_out, extent, ground_rgb, thing_mask

GREEN, RED = (50, 160, 70), (220, 40, 40)


def bar(left, top, right, bottom):
    picture = Image.new("RGB", (128, 128), GREEN)
    ImageDraw.Draw(picture).rectangle((left, top, right - 1, bottom - 1), fill=RED)
    return picture


@pytest.mark.parametrize("box", [(10, 30, 50, 110), (0, 0, 30, 20), (60, 60, 128, 128), (40, 62, 80, 66)])
def test_a_thing_reaches_from_its_first_row_to_its_last(box):
    left, top, right, bottom = box
    mask = np.zeros((128, 128), dtype=bool)
    mask[top:bottom, left:right] = True
    assert extent(mask, axis=0) == (top, bottom)
    assert extent(mask, axis=1) == (left, right)


def test_a_speck_is_no_part_of_a_thing():
    picture = bar(40, 40, 80, 80)
    picture.putpixel((5, 5), RED)
    assert thing_mask(np.asarray(picture, dtype=np.float64))[5, 5]
    assert cut_out(picture, 32).tobytes() == cut_out(bar(40, 40, 80, 80), 32).tobytes()


@pytest.mark.parametrize("size", [(20, 80), (80, 20), (40, 40), (6, 8)])
@pytest.mark.parametrize("place", [(10, 10), (30, 40)])
def test_a_thing_cut_out_keeps_its_form_wherever_and_however_large_it_was(size, place):
    (width, height), (left, top) = size, place
    cut = np.asarray(cut_out(bar(left, top, left + width, top + height), 64)).astype(int)
    assert cut.shape == (64, 64, 3)
    red = (cut[..., 0] - cut[..., 1]) > 60
    across, down = np.flatnonzero(red.any(axis=0)), np.flatnonzero(red.any(axis=1))
    spans = (across[-1] - across[0] + 1, down[-1] - down[0] + 1)
    assert max(spans) == pytest.approx(64 / 1.125, abs=2)
    assert spans[0] / spans[1] == pytest.approx(width / height, rel=0.12)
    assert (across.mean(), down.mean()) == pytest.approx((31.5, 31.5), abs=1)
    assert tuple(cut[0, 0]) == GREEN


def test_a_thing_too_thin_to_be_told_from_specks_leaves_the_whole_picture():
    picture = bar(60, 10, 62, 110)
    assert cut_out(picture, 32).tobytes() == picture.resize((32, 32), Image.Resampling.BILINEAR).tobytes()


def test_the_ground_of_a_tall_picture_is_its_border_too():
    picture = Image.new("RGB", (60, 400), GREEN)
    ImageDraw.Draw(picture).rectangle((8, 10, 51, 389), fill=RED)
    assert tuple(ground_rgb(np.asarray(picture, dtype=np.float64))) == GREEN


def test_an_empty_ground_stays_as_it_is():
    assert cut_out(Image.new("RGB", (128, 128), GREEN), 16).tobytes() == Image.new("RGB", (16, 16), GREEN).tobytes()
