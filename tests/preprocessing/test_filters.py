import pytest

from preprocessing.filters import reject_reason


@pytest.mark.parametrize(
    ("caption", "nsfw", "width", "height", "reason"),
    [
        ("a cat", "UNLIKELY", 640, 480, None),
        ("a cat", None, 640, 480, None),
        ("a cat", "", 640, 480, None),
        ("cat", None, 1, 1, None),
        ("猫と犬", None, 1, 1, None),
        ("a cat", None, 200, 100, None),
        ("a cat", None, 100, 200, None),
        (None, "UNLIKELY", 640, 480, "caption_missing"),
        ("", "UNLIKELY", 640, 480, "caption_missing"),
        (" \t\n ", "UNLIKELY", 640, 480, "caption_missing"),
        ("ab", "UNLIKELY", 640, 480, "caption_short"),
        (" ab ", "UNLIKELY", 640, 480, "caption_short"),
        ("a cat", "UNSURE", 640, 480, "nsfw"),
        ("a cat", "NSFW", 640, 480, "nsfw"),
        ("a cat", "unlikely", 640, 480, "nsfw"),
        ("a cat", None, 0, 480, "size_not_positive"),
        ("a cat", None, 640, -1, "size_not_positive"),
        ("a cat", None, 201, 100, "aspect_ratio"),
        ("a cat", None, 100, 201, "aspect_ratio"),
    ],
)
def test_the_papers_rules(caption, nsfw, width, height, reason):
    assert reject_reason(caption, nsfw, width, height) == reason


def test_the_first_reason_that_applies_is_given():
    assert reject_reason("", "NSFW", 0, 0) == "caption_missing"
    assert reject_reason("a cat", "NSFW", 0, 0) == "nsfw"
