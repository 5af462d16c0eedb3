"""Captions as people type them still name everything, and teach no words."""

import re
from random import Random

import pytest

from dalle_lean.vocabulary import Vocabulary, content_words
from preprocessing.emoji.fillers import MOODS, as_typed, made_up_word
from preprocessing.emoji.names import contains_words

NAMES = ["hat", "piano"]
CAPTIONS = ["an owl", "owl", "a small red owl in the top left corner, blue ground", "three owls", "a tree above an owl"]


@pytest.mark.parametrize("caption", CAPTIONS)
def test_words_are_added_and_none_but_articles_replaced(caption):
    typed = [as_typed(caption, NAMES, Random(seed)) for seed in range(200)]
    assert len({*typed}) > 150
    kept = content_words(caption)
    assert all([word for word in content_words(each) if word in kept] == kept for each in typed)


def test_an_article_fits_the_word_behind_it():
    for seed in range(300):
        assert not re.search(r"\b(a [aeio]|an [^aeio])", as_typed("an owl", NAMES, Random(seed)))


def test_both_of_two_things_get_adjectives():
    typed = [as_typed("a cat and a dog", NAMES, Random(seed)) for seed in range(100)]
    assert any(not contains_words(each, "a cat") and not contains_words(each, "a dog") for each in typed)
    assert all(contains_words(each, "cat") and contains_words(each, "dog") for each in typed)


def test_verbs_come_before_a_relation_or_with_another_thing():
    above = [as_typed("a tree above an owl", NAMES, Random(seed)) for seed in range(100)]
    assert any(re.search(r"tree \w+ing above an owl", each) for each in above)
    assert not any(contains_words(each, name) for each in above for name in NAMES)
    alone = [as_typed("an owl", NAMES, Random(seed)) for seed in range(100)]
    assert any(re.search(r"owl \w+ing a (hat|piano)", each) for each in alone)


def test_a_face_has_no_other_mood_than_its_own():
    typed = [as_typed("a weary face", NAMES, Random(seed)) for seed in range(300)]
    assert not any(contains_words(each, mood) for each in typed for mood in MOODS)


def test_hardly_any_made_up_word_counts_as_learnt():
    random = Random(0)
    learnt = Vocabulary.count(made_up_word(random) for _ in range(50_000)).words
    assert len(learnt) < 50
