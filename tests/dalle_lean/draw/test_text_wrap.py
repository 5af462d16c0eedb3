"""Text on drawn sheets."""

from PIL import ImageFont

from dalle_lean.draw.text_wrap import wrapped_within


def test_long_captions_are_cut_with_dots():
    font = ImageFont.load_default(13)
    lines = wrapped_within("a very long caption about nothing at all, " * 5, font, 150, 3)
    assert len(lines) == 3
    assert lines[-1].endswith("...")
    assert all(font.getlength(line) <= 150 for line in lines)
    assert wrapped_within("x" * 500, font, 150, 3)[0].endswith("...")
    assert wrapped_within("a cat", font, 150, 3) == ["a cat"]
    assert wrapped_within("", font, 150, 3) == [""]
