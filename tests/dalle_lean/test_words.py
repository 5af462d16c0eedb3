"""Counts with their nouns."""

import pytest

from dalle_lean.words import counted


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "fault", "0 faults"),
        (1, "fault", "1 fault"),
        (1200, "batch", "1,200 batches"),
        (2, "pass", "2 passes"),
        (2, "damaged shard", "2 damaged shards"),
    ],
)
def test_a_noun_has_the_number_of_its_count(count, noun, words):
    assert counted(count, noun) == words
