"""Text in any script on drawn sheets."""

import pytest
from PIL import ImageFont

from dalle_lean.draw.fonts import drawable, fonts, lettering


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("a red heart", "a red heart"),
        ("Kraków, ñandú, Łódź", "Krakow, nandu, ?odz"),
        ("e\u0301t\u00e9", "ete"),
        ("красное", "???????"),
        ("a \N{HEAVY BLACK HEART}\ufe0f", "a ?"),
        ("\udcff\0", "??"),
    ],
)
def test_what_the_built_in_font_lacks_loses_its_accents_or_is_a_question_mark(text, drawn):
    assert drawable(text, ImageFont.load_default(13)) == drawn


@pytest.mark.parametrize("text", ["ó", "красное сердце", "\N{HEAVY BLACK HEART}"])
def test_a_font_of_the_machine_is_taken_for_what_the_built_in_one_lacks(text):
    if len(fonts(20)) == 1:
        pytest.skip("no font with wide coverage is installed")
    drawn, font = lettering(text, 20)
    assert drawn == text
    assert font is not fonts(20)[0]
    assert lettering("a red heart", 20)[1] is fonts(20)[0]
