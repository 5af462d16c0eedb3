"""The set shows what people ask for by name, and no two things that look alike."""

from collections import Counter

import pytest
from PIL import Image

from preprocessing.emoji.choice import drop_reason
from preprocessing.emoji.lookalikes import without_lookalikes
from preprocessing.emoji.sets import Drawing, Thing


@pytest.mark.parametrize(
    ("label", "group", "subgroup", "reason"),
    [
        ("whale", "animals-nature", "animal-marine", None),
        ("firefighter", "people-body", "person-role", None),
        ("woman firefighter", "people-body", "person-role", "person or hand like others"),
        ("man: beard", "people-body", "person", "person or hand like others"),
        ("thumbs up", "people-body", "hand-fingers-closed", None),
        ("two o’clock", "travel-places", "time", "clock face"),
        ("alarm clock", "travel-places", "time", None),
        ("flag: Nowhere", "flags", "country-flag", "flag"),
        ("COOL button", "symbols", "alphanum", "button or sign"),
        ("red circle", "symbols", "geometric", None),
        ("black small square", "symbols", "geometric", "smaller copy of a shape"),
    ],
)
def test_emoji_that_nobody_asks_for_are_left_out_with_a_reason(label, group, subgroup, reason):
    assert drop_reason(label, group, subgroup) == reason


def drawing(name, group="objects"):
    return Drawing(thing=Thing(name=name, tags=(), group=group), set="one", body=name, view_box="0 0 1 1")


def test_of_two_that_look_alike_the_one_with_the_shorter_name_stays():
    face, same, other = drawing("face"), drawing("happy face"), drawing("moon")
    sprites = {face: Image.new("RGBA", (64, 64), "orange"), other: Image.new("RGBA", (64, 64), "grey")}
    sprites[same] = sprites[face].copy()
    sprites[same].putpixel((30, 30), (0, 0, 0, 255))
    dropped = Counter()
    assert without_lookalikes([same, other, face], sprites, dropped) == [face, other]
    assert dropped == {"look-alike": 1}


def test_outlines_tell_grey_things_apart():
    wide, tall = drawing("wide"), drawing("tall")
    sprites = {wide: Image.new("RGBA", (64, 32), "grey"), tall: Image.new("RGBA", (32, 64), "grey")}
    assert len(without_lookalikes([wide, tall], sprites, Counter())) == 2


def test_coloured_shapes_all_stay():
    red, orange = drawing("red circle", "shape"), drawing("orange circle", "shape")
    sprites = {red: Image.new("RGBA", (64, 64), (220, 40, 40)), orange: Image.new("RGBA", (64, 64), (225, 60, 40))}
    assert len(without_lookalikes([red, orange], sprites, Counter())) == 2
