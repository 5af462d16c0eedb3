"""Text in any script on drawn sheets."""

import pytest
from PIL import ImageFont

from dalle_lean.draw.fonts import drawable, fonts, lettering, wrapped_within


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("a red heart", "a red heart"),
        ("Kraków, ñandú, Łódź", "Krakow, nandu, ?odz"),
        ("e\u0301t\u00e9", "ete"),
        ("красное", "???????"),
        ("a \N{HEAVY BLACK HEART}\ufe0f", "a [heavy black heart]"),
        ("two 🐳", "two [spouting whale]"),
        ("\udcff\0", "??"),
    ],
)
def test_what_the_built_in_font_lacks_loses_its_accents_or_is_a_name_or_a_question_mark(text, drawn):
    assert drawable(text, ImageFont.load_default(13)) == drawn


@pytest.mark.parametrize("text", ["ó", "красное сердце", "\N{HEAVY BLACK HEART}"])
def test_a_font_of_the_machine_is_taken_for_what_the_built_in_one_lacks(text):
    if len(fonts(20)) == 1:
        pytest.skip("no font with wide coverage is installed")
    drawn, font = lettering(text, 20)
    assert drawn == text
    assert font is not fonts(20)[0]
    assert lettering("a red heart", 20)[1] is fonts(20)[0]


def test_long_captions_are_cut_with_dots():
    font = ImageFont.load_default(13)
    lines = wrapped_within("a very long caption about nothing at all, " * 5, font, 150, 3)
    assert len(lines) == 3
    assert lines[-1].endswith("...")
    assert all(font.getlength(line) <= 150 for line in lines)
    assert wrapped_within("x" * 500, font, 150, 3)[0].endswith("...")
    assert wrapped_within("a cat", font, 150, 3) == ["a cat"]
    assert wrapped_within("", font, 150, 3) == [""]
