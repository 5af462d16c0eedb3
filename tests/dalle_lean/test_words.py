"""Counts with their nouns, amounts with their units, misspelt names."""

import pytest

from dalle_lean.words import counted, human, human_bytes, perhaps


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


def test_bytes_are_told_in_three_digits():
    assert [human_bytes(count) for count in (0, 999, 1234, 99_960_000, 2.5e9, 1.234e12, 5.03e16)] == [
        "0 B",
        "999 B",
        "1.23 kB",
        "100 MB",
        "2.5 GB",
        "1.23 TB",
        "50.3 PB",
    ]


def test_an_amount_beyond_the_petas_has_three_digits_too():
    assert human(2.15e18, "FLOP") == "2.15 EFLOP"


def test_a_misspelt_name_leads_to_the_closest_known_one():
    assert perhaps("emoj128", ["emoji64", "emoji128", "tiny"]) == " (did you mean emoji128?)"
    assert perhaps("nothing", ["emoji64", "emoji128", "tiny"]) == ""
