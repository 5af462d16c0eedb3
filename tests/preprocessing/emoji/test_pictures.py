"""Pictures show what their captions say."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from preprocessing.emoji.heldout import GROUNDS, PAINTS
from preprocessing.emoji.render import draw, sprite
from preprocessing.emoji.scenes import CELLS, PAIR_CORNERS, SIZES, pair, plain, scene, several
from preprocessing.emoji.sets import Drawing, Thing

SIDE = 64


def square(name, fill, rest=""):
    thing = Thing(name=name, tags=(), group="objects")
    body = f'<rect x="8" y="8" width="8" height="8" fill="{fill}"/>{rest}'
    return Drawing(thing=thing, set="noto", body=body, view_box="0 0 32 32")


WHITE = square("tile", "#fff")
GREY = square("brick", "#888")


def pixels(picture, side=SIDE):
    """The picture drawn, [side, side, 3]."""
    sprites = {placed.drawing: sprite(placed.drawing, side) for placed in picture.placed}
    return np.asarray(draw(picture, sprites, side)).astype(int)


def pixels_like(picture, rgb):
    """[SIDE, SIDE] bool: pixels within 40 of `rgb` in every channel."""
    pixels_HWC = pixels(picture)
    return (abs(pixels_HWC - np.array(rgb)) <= 40).all(axis=2)


def middle(mask):
    """Mean position of the true pixels, (across, down), as shares of the side."""
    down, across = np.nonzero(mask)
    return across.mean() / SIDE, down.mean() / SIDE


@pytest.mark.parametrize("ground", GROUNDS)
def test_a_scene_has_the_exact_colour_of_its_ground_at_every_corner(ground):
    for i in range(10):
        picture = scene(WHITE, ground, Random(i))
        pixels_HWC = pixels(picture)
        free = [pixels_HWC[row, column] for row in (0, -1) for column in (0, -1)]
        assert all((corner == GROUNDS[ground]).all() for corner in free)


def test_a_thing_stands_where_its_place_says():
    for i in range(200):
        picture = scene(WHITE, "black", Random(i))
        across, down = middle(pixels_like(picture, (255, 255, 255)))
        sides = {"left": across < 0.4, "right": across > 0.6, "top": down < 0.4, "bottom": down > 0.6}
        told = {side: side in picture.place for side in sides}
        assert sides == told, picture.text


def test_a_big_thing_fills_most_of_a_side_and_a_small_one_little():
    extents = {"big": [], "small": []}
    for i in range(100):
        picture = scene(WHITE, "black", Random(i))
        extents[picture.size].append(np.sqrt(pixels_like(picture, (255, 255, 255)).mean()))
    assert 1.5 * max(extents["small"]) < min(extents["big"])


@pytest.mark.parametrize("paint", PAINTS)
@pytest.mark.parametrize("drawing", [WHITE, GREY, square("brick", "#d00")])
def test_a_painted_thing_shows_shades_of_its_colour_alone(paint, drawing):
    picture = scene(drawing, "black" if paint == "white" else "white", Random(0), paint)
    shown = pixels(picture).reshape(-1, 3)
    thing = np.median(shown[(shown != picture.ground_rgb).any(axis=1)], axis=0)
    colour = np.array(PAINTS[paint])
    assert (thing >= 0.7 * colour - 1).all()
    assert (thing <= colour + 41).all()


@pytest.mark.parametrize(
    ("paint", "length", "stays_dark"), [("white", 1, True), ("white", 5, False), ("grey", 1, True), ("grey", 5, False)]
)
def test_a_small_dark_part_of_a_white_or_grey_thing_stays_dark_as_an_eye_does(paint, length, stays_dark):
    eye = f'<rect x="10" y="10" width="{length}" height="{length}" fill="#111"/>'
    picture = scene(square("cat", "#963", eye), "red", Random(0), paint)
    assert pixels_like(picture, (30, 30, 30)).any() == stays_dark


@pytest.mark.parametrize("fill", ["#cc2c3b", "#888"])
def test_the_edge_of_a_white_thing_in_one_colour_is_not_dark(fill):
    ball = replace(WHITE, body=f'<circle cx="16" cy="16" r="12" fill="{fill}"/>')
    assert pixels(scene(ball, "pink", Random(0), "white"), side=128)[..., 0].min() > 0.7 * 255 - 2


def test_of_two_things_the_first_stands_where_the_caption_says():
    for i in range(100):
        picture = pair(WHITE, GREY, "black", Random(i))
        (across1, down1), (across2, down2) = (
            middle(pixels_like(picture, rgb)) for rgb in ((255, 255, 255), (136, 136, 136))
        )
        true = {
            "left of": across1 < across2 - 0.3,
            "right of": across1 > across2 + 0.3,
            "above": down1 < down2 - 0.3,
            "below": down1 > down2 + 0.3,
        }
        assert [relation for relation, holds in true.items() if holds] == [picture.place]


def test_of_two_painted_things_each_stands_in_its_colour_where_the_caption_says():
    for i in range(50):
        picture = pair(WHITE, GREY, "white", Random(i), ("blue", "red"))
        red, _, blue = pixels(picture).transpose(2, 0, 1)
        (across1, down1), (across2, down2) = middle(blue > red + 60), middle(red > blue + 60)
        true = {
            "left of": across1 < across2 - 0.3,
            "right of": across1 > across2 + 0.3,
            "above": down1 < down2 - 0.3,
            "below": down1 > down2 + 0.3,
        }
        assert [relation for relation, holds in true.items() if holds] == [picture.place]


def test_a_plain_drawing_is_whole_and_on_white():
    drawing = square("brick", "#d00")
    for i in range(10):
        picture = plain(drawing, (), Random(i))
        red = pixels_like(picture, (221, 0, 0))
        assert red.mean() >= 0.7**2
        assert (red | pixels_like(picture, (255, 255, 255))).mean() > 0.9


def test_a_thing_of_one_size_shows_the_same_pixels_in_the_boxes_of_the_grid_wherever_it_stands():
    cell = SIDE // CELLS
    for size, cells in SIZES.items():
        shown = set()
        for i in range(60):
            picture = scene(square("brick", "#d00"), "black", Random(i))
            if picture.size == size:
                across, down = (cell * corner for corner in picture.placed[0].corner)
                box = pixels(picture)[down : down + cells * cell, across : across + cells * cell]
                shown.add(box.tobytes())
        assert len(shown) == 1


@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_things_are_as_many_as_the_caption_says(count):
    picture = several(WHITE, count, "black", Random(0))
    white = pixels_like(picture, (255, 255, 255)).mean()
    one = pixels_like(several(WHITE, 2, "black", Random(0)), (255, 255, 255)).mean() / 2
    assert white == pytest.approx(count * one)
    assert picture.text.split()[0] in {2: ("two", "2"), 3: ("three", "3"), 4: ("four", "4")}[count]
    assert picture.things == ["tile"]


def test_every_box_lies_within_the_picture():
    for corners in PAIR_CORNERS.values():
        assert all(0 <= cell <= CELLS - SIZES["small"] for corner in corners for cell in corner)
    for i in range(200):
        (placed,) = scene(WHITE, "black", Random(i)).placed
        assert all(0 <= cell <= CELLS - placed.cells for cell in placed.corner)


def test_a_sprite_is_cut_to_what_is_visible():
    assert sprite(WHITE, SIDE).size == (SIDE, SIDE)


def test_an_empty_drawing_is_named():
    empty = Drawing(thing=Thing(name="nothing", tags=(), group="objects"), set="noto", body="<g/>", view_box="0 0 9 9")
    with pytest.raises(ValueError, match="'nothing' in noto"):
        sprite(empty, SIDE)
