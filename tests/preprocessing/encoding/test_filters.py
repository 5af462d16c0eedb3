import json

import pytest

from preprocessing.encoding.filters import Rules


def reject_reason(rules, caption, nsfw, width, height):
    return rules.text_reject_reason(caption, nsfw) or rules.size_reject_reason(width, height)


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
    assert reject_reason(Rules(), caption, nsfw, width, height) == reason


def test_the_first_reason_that_applies_is_given():
    assert reject_reason(Rules(), "", "NSFW", 0, 0) == "caption_missing"
    assert reject_reason(Rules(), "a cat", "NSFW", 0, 0) == "nsfw"


@pytest.mark.parametrize(
    ("switch", "sample"),
    [
        ({"min_caption_length": 0}, (None, "UNLIKELY", 640, 480)),
        ({"min_caption_length": 0}, ("ab", "UNLIKELY", 640, 480)),
        ({"min_caption_length": 2}, ("ab", "UNLIKELY", 640, 480)),
        ({"allowed_nsfw": None}, ("a cat", "NSFW", 640, 480)),
        ({"allowed_nsfw": ["UNLIKELY", "UNSURE"]}, ("a cat", "UNSURE", 640, 480)),
        ({"max_aspect_ratio": None}, ("a cat", None, 1000, 1)),
        ({"max_aspect_ratio": 3}, ("a cat", None, 300, 100)),
        ({"min_side": 0, "max_aspect_ratio": None}, ("a cat", None, 0, -5)),
    ],
)
def test_each_rule_can_be_moved_or_switched_off(switch, sample):
    assert reject_reason(Rules(), *sample) is not None
    assert reject_reason(Rules(**switch), *sample) is None


def test_other_labels_stay_rejected_where_some_are_allowed():
    assert Rules(allowed_nsfw=("UNSURE",)).text_reject_reason("a cat", "UNLIKELY") == "nsfw"
    assert Rules(allowed_nsfw=()).text_reject_reason("a cat", "UNLIKELY") == "nsfw"


def test_a_minimum_side_counts_the_shorter_one():
    rules = Rules(min_side=64)
    assert reject_reason(rules, "a cat", None, 64, 100) is None
    assert reject_reason(rules, "a cat", None, 100, 63) == "side_short"
    assert reject_reason(rules, "a cat", None, 0, 100) == "size_not_positive"


def test_the_rules_are_the_same_after_json():
    rules = Rules(allowed_nsfw=["UNLIKELY", "UNSURE"], max_hash_distance=6)
    saved = json.loads(json.dumps(rules.to_dict()))
    assert saved == rules.to_dict()
    assert Rules(**saved) == rules


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_caption_length": -1},
        {"allowed_nsfw": "UNLIKELY"},
        {"min_side": -1},
        {"max_aspect_ratio": 0.5},
        {"max_aspect_ratio": float("nan")},
        {"max_hash_distance": 64},
        {"max_hash_distance": -1},
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(wrong):
    ((name, _),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}="):
        Rules(**wrong)
