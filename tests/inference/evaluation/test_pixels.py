"""The judges see what a picture shows."""

import pytest
from PIL import Image

from inference.evaluation.pixels import (
    COLOURS,
    colour_centre,
    ground_colour,
    name_of,
    name_table,
    thing_colour,
    thing_size,
)
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
