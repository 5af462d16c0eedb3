"""Proportions have intervals, and claims are decided by the same prompts with and without."""

import pytest

from inference.evaluation.attribute_accuracy import FREE, PAPER, SamplingSetting, compare_settings, settings_to_try
from inference.evaluation.stats import Proportion, compare, holm, sign_test


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
    together = holm(alone)
    assert [claim.p_value for claim in together] == pytest.approx([2 * 2 / 64, 3 * 2 / 512, 1])
    assert [claim.verdict for claim in together] == ["not decided", "confirmed", "not decided"]


def test_guidance_is_tried_where_it_was_learnt():
    assert [setting.guidance for setting in settings_to_try(0.1)] == [1] * 6 + [2, 4, 2]
    assert settings_to_try(0.0) == settings_to_try(None) == settings_to_try(0.1)[:6]


def test_settings_are_compared_with_all_codes_and_guidance_with_none():
    guided = PAPER._replace(guidance=4.0)
    tried = (FREE, SamplingSetting(256), PAPER, guided)
    hits = {setting: {"ground": [setting != FREE] * 4, "size": [setting == guided] * 2} for setting in tried}
    told = [(claim.text, claim.prompts, claim.better) for claim in compare_settings(hits)]
    assert told == [
        ("top-k 256 does better than all codes", 6, 4),
        ("top-k 256, top-p 0.75 does better than all codes", 6, 4),
        ("top-k 256, top-p 0.75, guidance 4 does better than top-k 256, top-p 0.75", 6, 2),
    ]


def test_a_proportion_comes_with_its_confidence_interval():
    assert str(Proportion(9, 10)) == "90 % (9/10; 60 to 98)"
    assert str(Proportion(0, 0)) == "no prompts"
    low, high = Proportion(10, 10).interval
    assert 0.7 < low < 0.75
    assert high == 1
