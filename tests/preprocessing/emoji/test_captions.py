"""Captions read as English and say only what is so."""

from random import Random

import pytest

from preprocessing.emoji.captions import (
    PLACES,
    SIZE_WORDS,
    count_caption,
    noun_phrase,
    pair_caption,
    plain_caption,
    scene_caption,
)
from preprocessing.emoji.names import SYNONYMS, caption_name, contains_words, plural


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("red heart", "a red heart"),
        ("orange book", "an orange book"),
        ("hourglass", "an hourglass"),
        ("unicorn", "a unicorn"),
        ("umbrella", "an umbrella"),
        ("x-ray", "an x-ray"),
        ("one-piece swimsuit", "a one-piece swimsuit"),
        ("scissors", "scissors"),
        ("cheese", "cheese"),
        ("piece of cheese", "a piece of cheese"),
        ("skis", "skis"),
        ("octopus", "an octopus"),
        ("glass of milk", "a glass of milk"),
        ("cooked rice", "cooked rice"),
        ("nest with eggs", "a nest with eggs"),
        ("man's shoe", "a man's shoe"),
        ("Santa Claus", "Santa Claus"),
    ],
)
def test_a_thing_has_the_article_it_has_in_english(name, phrase):
    assert noun_phrase(name) == phrase


def test_the_article_goes_by_the_size_word_when_there_is_one():
    assert noun_phrase("owl", "small") == "a small owl"
    assert noun_phrase("scissors", "big") == "big scissors"


@pytest.mark.parametrize(
    ("label", "subgroup", "name"),
    [
        ("closed book", "book-paper", "red book"),
        ("man’s shoe", "clothing", "man's shoe"),
        ("no entry", "warning", "no entry sign"),
        ("peace symbol", "religion", "peace symbol"),
        ("dog face", "animal-mammal", "dog face"),
    ],
)
def test_labels_become_nouns(label, subgroup, name):
    assert caption_name(label, subgroup) == name


def test_words_are_found_whole():
    assert contains_words("a big Red apple, fruit", "red apple")
    assert not contains_words("an orangutan", "orange")
    assert not contains_words("a t-shirt", "shirt")


def test_plain_captions_vary_and_always_name_the_thing():
    captions = {plain_caption("owl", ["bird", "wise"], Random(i)) for i in range(200)}
    assert {"an owl", "owl", "a drawing of an owl", "owl, bird, wise"} <= captions
    assert all(contains_words(caption, "owl") for caption in captions)


def test_a_thing_is_called_by_its_plain_words_too():
    captions = {plain_caption("car", [], Random(i)) for i in range(200)}
    assert {"car", "a car", "automobile", "an automobile"} <= captions


@pytest.mark.parametrize("size", ["small", "big", None])
@pytest.mark.parametrize("place", PLACES)
def test_scene_captions_name_the_ground_and_no_other_size_or_place(size, place):
    captions = {scene_caption("owl", "orange", size, place, Random(i)) for i in range(60)}
    assert len(captions) > 3
    for caption in captions:
        assert contains_words(caption, "owl")
        assert contains_words(caption, "orange")
        said = {name for name, words in SIZE_WORDS.items() if {*words} & {*caption.split()}}
        assert said <= {size}
        rest = caption.replace(PLACES[place], "")
        assert not any(words in rest for words in PLACES.values())


def test_a_white_ground_goes_without_saying():
    captions = {scene_caption("owl", "white", None, "centre", Random(i), "blue") for i in range(200)}
    assert {"a blue owl", "blue owl", "a blue owl on a white ground"} <= captions


@pytest.mark.parametrize("relation", ["left of", "right of", "above", "below"])
def test_pair_captions_hold_whichever_thing_they_begin_with(relation):
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[relation]
    captions = {pair_caption("owl", "tree", relation, "blue", Random(i)) for i in range(100)}
    begins_with_owl = [caption.removeprefix("an ").startswith("owl") for caption in captions]
    assert any(begins_with_owl)
    assert not all(begins_with_owl)
    for caption, with_owl in zip(captions, begins_with_owl, strict=True):
        false = opposite if with_owl else relation
        assert false not in caption


@pytest.mark.parametrize(("relation", "first"), [("left of", "owl"), ("right of", "tree")])
@pytest.mark.parametrize("words", [" and ", " next to ", " beside "])
def test_two_things_without_a_side_stand_in_the_order_of_reading(relation, first, words):
    captions = {pair_caption("owl", "tree", relation, "blue", Random(i)) for i in range(200)}
    assert {contains_words(caption.split(words)[0], first) for caption in captions if words in caption} == {True}


@pytest.mark.parametrize("relation", ["above", "below"])
def test_two_things_one_above_the_other_are_said_to_be(relation):
    captions = {pair_caption("owl", "tree", relation, "blue", Random(i)) for i in range(200)}
    assert not any(" and " in caption or "next to" in caption or "beside" in caption for caption in captions)


@pytest.mark.parametrize(
    ("name", "many"),
    [
        ("red apple", "red apples"),
        ("glass of milk", "glasses of milk"),
        ("mouse", "mice"),
        ("sheep", "sheep"),
        ("die", "dice"),
        ("whale spouting water", "whales spouting water"),
        ("cutlery", None),
        ("cherry", "cherries"),
        ("toothbrush", "toothbrushes"),
        ("nest with eggs", "nests with eggs"),
        ("scissors", None),
        ("bread", None),
        ("Santa Claus", None),
        ("T-Rex", None),
    ],
)
def test_a_thing_that_can_be_counted_has_its_plural(name, many):
    assert plural(name) == many


def test_a_count_is_said_in_words_or_digits():
    captions = {count_caption("owl", 3, "blue", Random(i)) for i in range(60)}
    assert {caption.split()[0] for caption in captions} == {"three", "3"}
    assert all(contains_words(caption, "owls") and contains_words(caption, "blue") for caption in captions)


def test_things_are_counted_by_a_plain_word_too_and_painted_things_have_another_word_for_their_colour():
    captions = {count_caption("rabbit", 2, "blue", Random(i), "grey") for i in range(200)}
    for word in ("rabbits", "bunnies", "grey", "gray"):
        assert any(contains_words(caption, word) for caption in captions), word


def test_half_of_the_captions_of_white_things_do_not_mention_the_ground():
    captions = [scene_caption("owl", "blue", None, "left", Random(i), "white") for i in range(200)]
    assert 60 < sum("blue" in caption for caption in captions) < 140
    captions = [scene_caption("owl", "blue", None, "left", Random(i), "grey") for i in range(200)]
    assert all("blue" in caption for caption in captions)


def test_a_plain_word_stands_for_one_thing_only():
    words = [word for others in SYNONYMS.values() for word in others]
    assert len(words) == len(set(words))
    assert not set(words) & set(SYNONYMS)
