"""Batches in which pictures meet that only one thing tells apart."""

import json
from itertools import islice, product
from random import Random

import pytest
import torch

from training.clip.hard_negatives import HardNegatives, RankingQuestions, SimilarPictures, ranking_questions, shuffled
from training.clip.recipe import ClipRecipe
from training.data.image_text import ImageTextPairs
from training.data.picture_batches import caption_key, distinct_batches

GROUNDS = ("red", "green", "blue", "white")
PLACES = ("left", "right", "top")
THINGS = ("cat", "dog", "owl", "key", "cup", "hat")
LOOK, THING = ("ground", "place"), ("things",)


def listing(fields=("ground", "place", "things")):
    """Two pictures of each of 72 scenes, whose captions differ in how they tell it."""
    captions, attributes = [], []
    for (ground, place, thing), way in product(product(GROUNDS, PLACES, THINGS), ("a {}", "a drawing of a {}")):
        captions.append(f"{way.format(thing)} on the {place} on {ground}")
        told = {"ground": ground, "place": place, "things": [thing]}
        attributes.append({name: json.dumps(told[name]) for name in fields})
    return ImageTextPairs(torch.zeros(len(captions), 3, 1, 1, dtype=torch.uint8), captions, attributes=attributes)


def are_negatives(data, one, other, fields):
    """The plain twin: two pictures agree in `fields`, differ in another one, and have different captions."""
    mine, theirs = data.attributes[one], data.attributes[other]
    return (
        all(mine[name] == theirs[name] for name in fields)
        and mine != theirs
        and caption_key(data.captions[one]) != caption_key(data.captions[other])
    )


def hard(data, kinds=(LOOK, THING), **changes):
    return HardNegatives(data, ClipRecipe(alike=tuple(kinds), **{"batch_size": 16, "hard_group_size": 4, **changes}))


def batches(data, negatives, count):
    begun = distinct_batches(data.captions, negatives.num_anchors, negatives.seed)
    return [negatives.batch(step, rows) for step, rows in islice(enumerate(begun, start=1), count)]


def rows_with_negatives(data, batch, fields, count):
    """How many rows of a batch meet at least `count` negatives in it."""
    return sum(sum(are_negatives(data, row, other, fields) for other in batch) >= count for row in batch)


@pytest.mark.parametrize("fields", [LOOK, THING])
def test_half_of_a_batch_are_groups_of_four_that_agree_in_these_fields_and_in_no_others(fields):
    data = listing()
    negatives = hard(data, [fields])
    assert (negatives.groups, negatives.num_anchors) == (2, 10)
    for batch in batches(data, negatives, 20):
        assert len(batch) == 16
        assert rows_with_negatives(data, batch, fields, 3) >= 8


def test_the_kinds_of_groups_take_turns():
    data = listing()
    for batch in batches(data, hard(data), 20):
        assert rows_with_negatives(data, batch, LOOK, 3) >= 4
        assert rows_with_negatives(data, batch, THING, 3) >= 4


def test_no_batch_holds_a_caption_twice_however_it_is_written():
    data = listing()
    captions = [caption.upper() if row % 3 else f" {caption}" for row, caption in enumerate(data.captions)]
    twice = ImageTextPairs(
        torch.cat([data.pixels] * 2),
        [*data.captions, *captions],
        attributes=[*data.attributes, *reversed(data.attributes)],
    )
    for batch in batches(twice, hard(twice, batch_size=64, hard_negative_share=0.9, hard_group_size=6), 20):
        assert len(batch) == len({caption_key(twice.captions[row]) for row in batch}) == 64


def test_a_group_shows_nothing_twice_though_captions_tell_it_in_two_ways():
    data = listing()
    for negatives in (
        list(SimilarPictures(data.captions, data.attributes, LOOK).negatives(row, Random(row))) for row in range(20)
    ):
        assert len(negatives) == 5
        assert len({data.attributes[row]["things"] for row in negatives}) == 5


def test_negatives_are_those_that_the_plain_comparison_finds():
    data = listing()
    rows = Random(0).sample(range(len(data)), 40)
    some = data.take(rows)
    for fields in (LOOK, THING, ("ground",), ("place", "things")):
        similar = SimilarPictures(some.captions, some.attributes, fields)
        for row in range(len(some)):
            found = {negative for seed in range(30) for negative in similar.negatives(row, Random(seed))}
            assert found == {other for other in range(len(some)) if are_negatives(some, row, other, fields)}


def test_a_batch_depends_on_seed_and_step_alone():
    data = listing()
    whole = batches(data, hard(data), 12)
    assert batches(data, hard(data), 12) == whole
    assert batches(data, hard(data, seed=1), 12) != whole
    again = hard(data)
    begun = islice(distinct_batches(data.captions, again.num_anchors, again.seed), 7, 12)
    assert [again.batch(step, rows) for step, rows in enumerate(begun, start=8)] == whole[7:]


def test_every_picture_has_its_turn_within_one_pass():
    data = listing()
    negatives = hard(data)
    one_pass = len(data) // negatives.num_anchors
    seen = {row for batch in batches(data, negatives, one_pass) for row in batch}
    assert len(seen) >= len(data) - negatives.num_anchors


@pytest.mark.parametrize("kinds", [(LOOK,), (("ground", "price"),)])
def test_a_listing_without_the_fields_gives_plain_batches_and_says_so(kinds, caplog):
    caplog.set_level("INFO", "training")
    data = listing(fields=("ground", "things"))
    negatives = hard(data, kinds)
    assert negatives.num_anchors == 16
    assert batches(data, negatives, 9) == list(islice(distinct_batches(data.captions, 16, 0), 9))
    (notice,) = caplog.messages
    assert f"the listing lacks {kinds[0][1]}" in notice
    assert f"the same {', '.join(kinds[0])}" in notice


def test_of_two_kinds_the_one_that_the_listing_has_fields_for_remains(caplog):
    caplog.set_level("INFO", "training")
    data = listing(fields=("ground", "things"))
    negatives = hard(data)
    assert len(caplog.messages) == 1
    for batch in batches(data, negatives, 9):
        assert rows_with_negatives(data, batch, THING, 3) >= 8


def test_pictures_that_agree_in_all_that_is_told_are_no_hard_negatives(caplog):
    caplog.set_level("INFO", "training")
    data = listing(fields=LOOK)
    negatives = hard(data, [LOOK])
    assert negatives.groups == 0
    assert "differ in no other field" in caplog.messages[0]


def test_no_share_asks_nothing_of_the_listing(caplog):
    caplog.set_level("INFO", "training")
    data = listing(fields=())
    negatives = hard(data, hard_negative_share=0.0)
    assert (negatives.groups, caplog.messages) == (0, [])


def test_lines_without_the_fields_are_in_batches_but_in_no_group():
    data = listing()
    half = ImageTextPairs(
        data.pixels, data.captions, attributes=[told if row % 4 else {} for row, told in enumerate(data.attributes)]
    )
    negatives = hard(half, [LOOK])
    made = batches(half, negatives, 30)
    assert {row for batch in made for row in batch} > {row for row in range(len(half)) if row % 4 == 0}
    for batch in made:
        told = [row for row in batch if row % 4]
        assert rows_with_negatives(half, told, LOOK, 3) >= 8


def test_a_group_that_finds_too_few_negatives_is_smaller_and_the_batch_is_full_all_the_same():
    data = listing().take(range(24))  # two looks
    negatives = hard(data, [LOOK], hard_group_size=8)
    for batch in batches(data, negatives, 9):
        assert len({caption_key(data.captions[row]) for row in batch}) == 16


def test_more_pictures_in_a_batch_than_captions_are_refused():
    with pytest.raises(ValueError, match="batch_size=145: there are only 144 different captions"):
        hard(listing(), batch_size=145)


def test_rows_are_shuffled_whole_and_a_few_of_them_are_a_fair_draw():
    assert sorted(shuffled(range(10), Random(0))) == list(range(10))
    firsts = [tuple(islice(shuffled(range(4), Random(seed)), 2)) for seed in range(2400)]
    counts = [firsts.count(pair) for pair in product(range(4), repeat=2) if pair[0] != pair[1]]
    assert sum(counts) == 2400
    assert min(counts) > 150


def test_ranking_questions_ask_for_the_own_caption_among_those_of_pictures_that_look_alike():
    data = listing()
    heldout, train = data.take(range(0, 144, 9)), data.take([row for row in range(144) if row % 9])
    questions = ranking_questions(heldout, train, LOOK, of=5, seed=0)
    assert questions.choices.shape == (16, 5)
    for picture, choices in zip(questions.pictures.tolist(), questions.choices.tolist(), strict=True):
        own, *others = (data.captions.index(questions.captions[choice]) for choice in choices)
        assert data.captions[own] == heldout.captions[picture]
        assert all(are_negatives(data, own, other, LOOK) for other in others)
        assert len({data.attributes[other]["things"] for other in others}) == 4


def test_ranking_questions_leave_out_pictures_with_too_few_negatives():
    data = listing()
    heldout = data.take([0, 140])
    assert ranking_questions(heldout, data.take(range(1, 12)), LOOK, of=6, seed=0).pictures.tolist() == [0]
    assert ranking_questions(heldout, data, LOOK, of=7, seed=0) is None
    assert ranking_questions(heldout, data, ("price",), of=2, seed=0) is None


def test_ranking_questions_count_own_captions_that_beat_all_others():
    features = torch.eye(3)
    questions = RankingQuestions(torch.tensor([2, 0]), ["c", "a", "b"], torch.tensor([[0, 1, 2], [1, 0, 2]]))
    texts = features[[2, 0, 1]]
    assert questions.accuracy(features, texts) == 1.0
    assert questions.accuracy(features[[1, 0, 2]], texts) == 0.5
    assert questions.accuracy(torch.zeros(3, 3), texts) == 0.0  # a tie is no win


def test_extra_captions_are_hard_negatives_of_the_pictures_of_a_batch_and_none_of_theirs():
    data = listing()
    negatives = hard(data, [LOOK])
    (batch,) = batches(data, negatives, 1)
    extra = negatives.extra_captions(1, batch, 12)
    captions = [caption_key(data.captions[row]) for row in (*batch, *extra)]
    assert len(extra) == 12
    assert len({*captions}) == len(captions)
    assert all(any(are_negatives(data, row, of, LOOK) for of in batch) for row in extra)
    assert negatives.extra_captions(1, batch, 12) == extra != negatives.extra_captions(2, batch, 12)


def test_where_nothing_tells_which_pictures_are_similar_extra_captions_are_any_others():
    data = listing(fields=())
    negatives = hard(data)
    extra = negatives.extra_captions(1, batch := [0, 1, 2], 20)
    assert len({caption_key(data.captions[row]) for row in (*batch, *extra)}) == 23
    assert len(negatives.extra_captions(1, batch, 1000)) == len({*data.captions}) - 3
