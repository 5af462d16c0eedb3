"""Claims are decided by the same prompts with and without."""

import pytest

from inference.evaluation.sampling_grid import FREE, PAPER, Way, claims_of_ways, ways_to_try
from inference.evaluation.significance import compare, decide_together, sign_test


@pytest.mark.parametrize(
    ("more", "less", "p"),
    [(0, 0, 1), (1, 0, 1), (5, 0, 2 / 32), (6, 0, 2 / 64), (8, 2, 2 * 56 / 1024), (3, 3, 1), (0, 6, 2 / 64)],
)
def test_the_p_of_a_sign_test_is_that_of_a_fair_coin(more, less, p):
    assert sign_test(more, less) == pytest.approx(p)


@pytest.mark.parametrize(
    ("with_it", "without", "verdict"),
    [
        ([1] * 6, [0] * 6, "confirmed"),
        ([0] * 6, [1] * 6, "refuted"),
        ([1] * 5, [0] * 5, "not decided"),
        ([3, 4, 2, 2, 1, 4, 0, 0], [2, 3, 1, 1, 0, 3, 0, 0], "confirmed"),
        ([], [], "not decided"),
    ],
)
def test_a_claim_is_decided_where_the_prompts_that_differ_agree(with_it, without, verdict):
    assert compare("it helps", with_it, without).verdict == verdict


def test_a_claim_is_told_with_its_numbers():
    claim = compare("To choose helps", [True] * 9 + [False], [False] * 8 + [True, True])
    assert str(claim) == (
        "To choose helps: confirmed. Of 10 prompts 8 fared better with it and 1 without it (p = 0.039)."
    )
    assert claim.to_dict() == {
        "text": "To choose helps",
        "prompts": 10,
        "better": 8,
        "worse": 1,
        "p_value": pytest.approx(20 / 512),
        "verdict": "confirmed",
    }


def test_a_claim_among_others_needs_more_to_be_decided():
    strong, weak, none = ([1] * hits + [0] * (10 - hits) for hits in (9, 6, 0))
    alone = [compare("it helps", found, [0] * 10) for found in (weak, strong, none)]
    assert [claim.verdict for claim in alone] == ["confirmed", "confirmed", "not decided"]
    together = decide_together(alone)
    assert [claim.p_value for claim in together] == pytest.approx([2 * 2 / 64, 3 * 2 / 512, 1])
    assert [claim.verdict for claim in together] == ["not decided", "confirmed", "not decided"]


def test_guidance_is_tried_where_it_was_learnt():
    assert [way.guidance for way in ways_to_try(0.1)] == [1] * 6 + [2, 4, 2]
    assert ways_to_try(0.0) == ways_to_try(None) == ways_to_try(0.1)[:6]


def test_ways_are_claimed_to_do_better_than_all_codes_and_guidance_than_none():
    guided = PAPER._replace(guidance=4.0)
    hits = {way: {"ground": [way != FREE] * 4, "size": [way == guided] * 2} for way in (FREE, Way(256), PAPER, guided)}
    told = [(claim.text, claim.prompts, claim.better) for claim in claims_of_ways(hits)]
    assert told == [
        ("top-k 256 does better than all codes", 6, 4),
        ("top-k 256, top-p 0.75 does better than all codes", 6, 4),
        ("top-k 256, top-p 0.75, guidance 4 does better than top-k 256, top-p 0.75", 6, 2),
    ]
