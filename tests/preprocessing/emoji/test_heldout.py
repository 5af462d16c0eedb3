"""Nothing held out is in training, and what is held out apart is known apart."""

from collections import Counter
from dataclasses import replace

import pytest

from dalle_lean.errors import UserError
from preprocessing.emoji.__main__ import read_copies
from preprocessing.emoji.captions import COLOUR_SYNONYMS
from preprocessing.emoji.heldout import GROUNDS, hold_out
from preprocessing.emoji.names import contains_words, plural
from preprocessing.emoji.plan import COPIES, plan_held_out, plan_training
from preprocessing.emoji.sets import CODE_POINT_SETS, read_drawings, read_things


@pytest.fixture(scope="module")
def drawings(emoji_packages):
    dropped = Counter()
    things = read_things(emoji_packages / "emojibase-data", dropped)
    return read_drawings(emoji_packages, things, dropped, sets=CODE_POINT_SETS)


@pytest.fixture(scope="module")
def held_out(drawings):
    return hold_out(drawings)


@pytest.fixture(scope="module")
def training(drawings, held_out):
    return plan_training(drawings, held_out, seed=0)


@pytest.fixture(scope="module")
def kept_out(drawings, held_out):
    return plan_held_out(drawings, held_out, seed=0, num_pairs=40)


def names(picture, paint, thing):
    """Whether a caption names a painted thing, with either word for its colour."""
    words = (paint, COLOUR_SYNONYMS.get(paint, paint))
    return any(contains_words(picture.text, f"{word} {thing}") for word in words)


def test_every_kind_of_holding_out_is_used(held_out, kept_out):
    assert held_out.concepts
    assert held_out.drawings
    assert held_out.grounds
    assert {picture.held_out for picture in kept_out} == {"concept", "drawing", "ground", "paint", "thing pair"}


def test_no_held_out_concept_is_drawn_or_named_in_training(training, held_out):
    for picture in training:
        assert not held_out.concepts.intersection(picture.things)
        assert not any(contains_words(picture.text, name) for name in held_out.concepts), picture.text


def test_no_held_out_drawing_is_in_training_but_its_thing_is(training, held_out):
    seen = {(placed.drawing.thing.name, placed.drawing.set) for picture in training for placed in picture.placed}
    assert not held_out.drawings & seen
    assert {thing for thing, _ in held_out.drawings} <= {thing for thing, _ in seen}


def test_no_held_out_ground_is_behind_its_thing_in_training_but_both_are_seen_apart(training, held_out):
    seen = {(thing, picture.ground) for picture in training for thing in picture.things}
    assert not held_out.grounds & seen
    assert {thing for thing, _ in held_out.grounds} <= {thing for thing, _ in seen}
    assert {ground for _, ground in held_out.grounds} <= {ground for _, ground in seen}


def test_no_thing_is_painted_in_its_held_out_colour_in_training_but_both_are_seen_apart(training, held_out):
    seen = {(placed.drawing.thing.name, placed.paint) for picture in training for placed in picture.placed}
    assert held_out.paints
    assert not held_out.paints & seen
    assert {thing for thing, _ in held_out.paints} <= {thing for thing, _ in seen}
    assert {paint for _, paint in held_out.paints} <= {paint for _, paint in seen}


def test_pixels_judge_no_white_or_grey_thing(held_out, kept_out):
    assert {paint for _, paint in held_out.paints} <= {*GROUNDS}
    assert {paint for picture in kept_out for paint in picture.paints if paint} <= {*GROUNDS}


def test_a_painted_thing_is_named_with_its_colour_and_is_not_on_it(training, kept_out):
    painted = [picture for picture in [*training, *kept_out] if picture.kind == "painted"]
    assert painted
    for picture in painted:
        assert names(picture, picture.paint, picture.things[0]), picture.text
        assert picture.ground != picture.paint


def test_things_painted_in_a_pair_are_each_named_with_their_colour_and_on_another_ground(training):
    pairs = [picture for picture in training if picture.kind == "painted-pair"]
    twins = [picture for picture in pairs if len(picture.things) == 1]
    assert 0.1 < len(twins) / len(pairs) < 0.7
    for picture in pairs:
        first, second = picture.placed
        assert first.paint
        assert first.paint != second.paint
        assert picture.ground not in (first.paint, second.paint)
        assert names(picture, first.paint, first.drawing.thing.name), picture.text
        if second.paint:
            assert names(picture, second.paint, second.drawing.thing.name), picture.text


def test_things_painted_and_counted_are_all_of_the_colour_that_the_caption_names(training):
    counted = [picture for picture in training if picture.kind == "painted-count"]
    assert {len(picture.placed) for picture in counted} == {2, 3, 4}
    for picture in counted:
        assert {placed.paint for placed in picture.placed} == {picture.paint}
        assert names(picture, picture.paint, plural(picture.things[0])), picture.text
        assert picture.ground != picture.paint


def test_no_held_out_pair_of_things_is_side_by_side_in_training(training, kept_out):
    def pairs(pictures):
        return {frozenset(picture.things) for picture in pictures if len(picture.things) == 2}

    held_out_pairs = pairs(picture for picture in kept_out if picture.held_out == "thing pair")
    assert len(held_out_pairs) > 10
    assert not held_out_pairs & pairs(training)


def test_training_pictures_say_they_are_not_held_out_and_held_out_ones_say_why(training, kept_out):
    assert {picture.held_out for picture in training} == {None}
    assert None not in {picture.held_out for picture in kept_out}


def test_what_is_held_out_does_not_depend_on_the_order_of_drawings(drawings, held_out):
    assert hold_out(drawings[::-1]) == held_out


def test_no_thing_is_on_a_ground_of_its_own_name(training):
    for picture in training:
        if picture.ground != "white":
            assert not any(contains_words(thing, picture.ground) for thing in picture.things)


def test_copies_multiply_the_pictures_of_every_kind(drawings, held_out, training):
    twice = {kind: 2 * number for kind, number in COPIES.items()}
    doubled = Counter(picture.kind for picture in plan_training(drawings, held_out, seed=0, copies=twice))
    once = Counter(picture.kind for picture in training)
    # Held-out pairs that come up are left out.
    pairs = ("pair", "painted-pair")
    assert all(doubled[kind] == 2 * once[kind] for kind in once if kind not in pairs)
    assert all(once[kind] < doubled[kind] < 4 * once[kind] for kind in pairs)


@pytest.mark.parametrize("kind", ["plain", "scene", "painted", "count", "painted-count"])
def test_copies_of_a_kind_change_that_kind_alone(drawings, held_out, training, kind):
    once = Counter(picture.kind for picture in training)
    more = Counter(p.kind for p in plan_training(drawings, held_out, 0, {**COPIES, kind: 3 * COPIES[kind]}))
    # One stream of random numbers draws all of a thing: more of one kind changes which pairs come up held out.
    assert {**more, "pair": 0} == {**once, kind: 3 * once[kind], "pair": 0}


def test_more_white_and_grey_things_are_added_to_the_others(drawings, held_out, training):
    more = plan_training(drawings, held_out, 0, {**COPIES, "painted-white-or-grey": 2})
    added = Counter(p.paint for p in more if p.kind == "painted") - Counter(
        p.paint for p in training if p.kind == "painted"
    )
    assert set(added) == {"white", "grey"}
    assert added["white"] == added["grey"] == len(more) - len(training) - added["grey"]


def test_fillers_change_that_share_of_the_captions_and_nothing_else(drawings, held_out, training):
    typed = plan_training(drawings, held_out, seed=0, fillers=0.4)
    assert [replace(picture, text="") for picture in typed] == [replace(picture, text="") for picture in training]
    changed = sum(one.text != other.text for one, other in zip(typed, training, strict=True))
    assert 0.3 < changed / len(training) < 0.4


def test_copies_are_read_by_kind():
    assert read_copies("scene=3, painted-pair=0") == dict.fromkeys(COPIES, 0) | {"scene": 3}


@pytest.mark.parametrize("text", ["2", "scene", "scene=", "scene=-1", "ship=3", "", "scene=0", "pair=1,pair=2"])
def test_copies_of_no_kind_or_number_are_refused(text):
    with pytest.raises(UserError, match="like pair=14"):
        read_copies(text)
