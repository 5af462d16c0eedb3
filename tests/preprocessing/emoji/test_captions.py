"""Captions read as English and say only what is so."""

from random import Random

import pytest

from preprocessing.emoji.captions import PLACES, a, pair_caption, plain_caption, scene_caption
from preprocessing.emoji.names import caption_name, contains_words


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
        ("skis", "skis"),
        ("octopus", "an octopus"),
        ("glass of milk", "a glass of milk"),
        ("cooked rice", "cooked rice"),
        ("person lifting weights", "a person lifting weights"),
        ("nest with eggs", "a nest with eggs"),
        ("women holding hands", "women holding hands"),
        ("man's shoe", "a man's shoe"),
        ("Santa Claus", "Santa Claus"),
    ],
)
def test_a_thing_has_the_article_it_has_in_english(name, phrase):
    assert a(name) == phrase


def test_the_article_goes_by_the_size_word_when_there_is_one():
    assert a("owl", "small") == "a small owl"
    assert a("scissors", "big") == "big scissors"


@pytest.mark.parametrize(
    ("label", "subgroup", "name"),
    [
        ("closed book", "book-paper", "red book"),
        ("two-thirty", "time", "clock at half past two"),
        ("two o’clock", "time", "clock at two o'clock"),
        ("man: red hair", "person", "man with red hair"),
        ("woman: bald", "person", "bald woman"),
        ("no smoking", "warning", "no smoking sign"),
        ("ATM sign", "transport-sign", "ATM sign"),
        ("A button (blood type)", "alphanum", "A button"),
        ("Japanese “here” button", "alphanum", "Japanese here button"),
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
    captions = {plain_caption("dog", ["pet", "puppy"], Random(i)) for i in range(100)}
    assert {"a dog", "a drawing of a dog", "dog, pet, puppy", "a dog, pet"} <= captions
    assert all(contains_words(caption, "dog") for caption in captions)


@pytest.mark.parametrize("size", ["small", "big", None])
@pytest.mark.parametrize("place", PLACES)
def test_scene_captions_name_the_ground_and_no_other_size_or_place(size, place):
    captions = {scene_caption("owl", "orange", size, place, Random(i)) for i in range(60)}
    assert len(captions) > 3
    for caption in captions:
        assert contains_words(caption, "owl")
        assert "on an orange ground" in caption or "on an orange background" in caption
        assert {word for word in ("small", "big") if word in caption.split()} <= {size}
        told = caption.replace(PLACES[place], "")
        assert not any(words in told for words in PLACES.values())


@pytest.mark.parametrize("relation", ["left of", "right of", "above", "below"])
def test_pair_captions_hold_whichever_thing_they_begin_with(relation):
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}[relation]
    captions = {pair_caption("cat", "tree", relation, "blue", Random(i)) for i in range(100)}
    assert any(caption.startswith("a cat") for caption in captions)
    assert any(caption.startswith("a tree") for caption in captions)
    for caption in captions:
        false = opposite if caption.startswith("a cat") else relation
        assert false not in caption
        assert "next to" not in caption or relation in ("left of", "right of")
