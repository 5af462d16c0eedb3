"""The judges see what a picture shows."""

from random import Random

import pytest
from PIL import Image

from inference.evaluation.pixels import (
    COLOURS,
    colour_centre,
    ground_colour,
    name_of,
    name_table,
    thing_colour,
    thing_count,
    thing_size,
)
from preprocessing.emoji.render import draw, sprite
from preprocessing.emoji.scenes import several
from preprocessing.emoji.sets import Drawing, Thing
from tests.inference.evaluation.drawings import RGB, discs


@pytest.mark.parametrize("ground", RGB)
def test_the_ground_is_the_colour_of_the_border(ground):
    assert ground_colour(discs(ground, ("red" if ground != "red" else "blue", 0.5, 0.7))) == ground


@pytest.mark.parametrize("colour", [colour for colour in RGB if colour != "white"])
def test_a_things_colour_is_told_on_every_ground_but_its_own(colour):
    for ground in RGB:
        expected = None if ground == colour else colour
        assert thing_colour(discs(ground, (colour, 0.5, 0.5))) == expected


def test_a_thing_is_small_or_big_by_its_longer_side():
    assert [thing_size(discs("white", ("red", 0.5, d))) for d in (0.3, 0.55, 0.8)] == ["small", None, "big"]


@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
def test_things_that_stand_apart_are_counted(drawn):
    discs_drawn = [("red", across, 0.18) for across in (0.2, 0.5, 0.8)[:drawn]]
    assert thing_count(discs("white", *discs_drawn)) == drawn


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("ground", ["white", "blue"])
def test_things_in_rows_and_their_parts_are_counted_as_the_emoji_set_places_them(count, ground):
    parted = Drawing(
        thing=Thing(name="pair of dots", tags=(), group="objects"),
        set="noto",
        body="".join(f'<rect x="{x}" y="8" width="7" height="16" fill="#d00"/>' for x in (8, 17)),
        view_box="0 0 32 32",
    )
    picture = several(parted, count, ground, Random(0))
    assert thing_count(draw(picture, {parted: sprite(parted, 128)}, 128)) == count


def test_the_centre_of_a_colour_is_where_its_disc_stands():
    picture = discs("white", ("red", 0.25, 0.3), ("blue", 0.75, 0.3))
    assert colour_centre(picture, "red") == pytest.approx((0.25, 0.5), abs=0.02)
    assert colour_centre(picture, "blue") == pytest.approx((0.75, 0.5), abs=0.02)
    assert colour_centre(picture, "green") is None


def test_an_empty_picture_shows_nothing():
    empty = Image.new("RGB", (64, 64), "white")
    assert thing_colour(empty) is None
    assert thing_size(empty) is None


def test_an_edge_of_a_colour_is_no_thing_of_it():
    picture = discs("white", ("red", 0.25, 0.3), ("blue", 0.75, 0.06))
    assert colour_centre(picture, "red") is not None
    assert colour_centre(picture, "blue") is None


def test_the_table_of_names_says_what_the_rule_says():
    table = name_table()
    assert set(table.flatten()) <= {*COLOURS, "white"}
    for rgb in ((250, 30, 30), (10, 10, 10), (130, 65, 180), (245, 150, 190)):
        assert table[tuple(channel >> 3 for channel in rgb)] == name_of([(channel >> 3) * 8 + 4 for channel in rgb])
