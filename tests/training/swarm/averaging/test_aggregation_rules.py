"""A minority cannot steer the average, whatever it sends."""

import asyncio
import itertools

import pytest
import torch

from training.swarm.averaging import aggregation_rules
from training.swarm.averaging.aggregation_rules import CLIPPING_ROUNDS, REJECT_RADII, RULES, cap_weights
from training.swarm.averaging.state_averager import STALE_WEIGHT

ROBUST = sorted(set(RULES) - {"mean"})
VALUES = 4000


def reduce(rule, parts, weights=None, order=None, **options):
    """The average of a single part that all senders get; parts [N, n]."""
    order = range(len(parts)) if order is None else order
    weights = [1.0] * len(parts) if weights is None else weights

    async def run():
        reducer = RULES[rule]((parts[0].shape,), len(parts), **options)
        sent = [asyncio.create_task(reducer.accumulate_part(i, 0, parts[i], weight=weights[i])) for i in order]
        first, *others = await asyncio.gather(*sent)
        assert all(torch.equal(first, other) for other in others)
        return first

    return asyncio.run(run())


@pytest.fixture
def truth():
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def honest(truth):
    """Seven noisy gradients, [7, n]."""
    return truth + 0.5 * torch.randn(7, VALUES, generator=torch.Generator().manual_seed(1))


def attacks(honest):
    mean, spread = honest.mean(0), honest.std(0)
    noise = torch.randn(VALUES, generator=torch.Generator().manual_seed(2))
    return {
        "ten times the opposite": -10 * mean,
        "noise of a hundred times the norm": 100 * noise * mean.std(),
        "a constant": torch.full_like(mean, 5.0),
        "nearly the largest number": torch.full_like(mean, 9e11),
        "a little is enough": mean - spread,
        "inner product": -0.5 * mean,
    }


def error(found, truth):
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("attack", attacks(torch.zeros(2, VALUES)))
@pytest.mark.parametrize(("count", "enemies"), [(3, 1), (7, 3)])
def test_centred_clipping_stays_with_the_honest(truth, honest, attack, count, enemies):
    bad = attacks(honest[:count])[attack].expand(enemies, VALUES)
    found = reduce("centred_clipping", torch.cat([honest[:count], bad]))
    plain = honest[:count].mean(0)
    assert torch.dot(found, truth) > 0.7 * truth.norm() ** 2
    assert error(found, truth) < 2 * error(plain, truth)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("attack", attacks(torch.zeros(2, VALUES)))
def test_every_rule_bears_one_enemy_of_four(truth, honest, rule, attack):
    found = reduce(rule, torch.cat([honest[:3], attacks(honest[:3])[attack][None]]))
    assert torch.dot(found, truth) > 0.7 * truth.norm() ** 2
    assert error(found, truth) < 2 * error(honest[:3].mean(0), truth)


def test_one_enemy_of_four_turns_the_plain_mean_round(truth, honest):
    found = reduce("mean", torch.cat([honest[:3], attacks(honest)["ten times the opposite"][None]]))
    assert torch.dot(found, truth) < 0


@pytest.mark.parametrize("rule", ROBUST)
def test_among_the_honest_a_rule_is_about_as_good_as_the_mean(truth, honest, rule):
    # For normal noise, the median's error is sqrt(pi / 2) times the mean's.
    assert error(reduce(rule, honest), truth) < 1.3 * error(honest.mean(0), truth)


@pytest.mark.parametrize("rule", ROBUST)
def test_the_order_of_arrival_does_not_matter(honest, rule):
    weights = (0.1, 0.7, 0.3)
    first = reduce(rule, honest[:3], weights)
    for order in itertools.permutations(range(3)):
        assert torch.equal(reduce(rule, honest[:3], weights, order), first)


@pytest.mark.parametrize("rule", ROBUST)
def test_two_senders_get_their_mean(honest, rule):
    torch.testing.assert_close(reduce(rule, honest[:2], weights=(3.0, 1.0)), (3 * honest[0] + honest[1]) / 4)


@pytest.mark.parametrize("rule", ROBUST)
def test_who_sends_the_same_gets_the_same(truth, rule):
    torch.testing.assert_close(reduce(rule, truth.expand(4, VALUES).clone()), truth)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("apart", [0.0, 1e-6], ids=["equal", "nearly equal"])
def test_one_enemy_moves_nothing_among_peers_that_agree(truth, honest, rule, apart):
    agreeing = truth + apart * (honest[:3] - truth)
    found = reduce(rule, torch.cat([agreeing, 50 * honest[3:4]]))
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ROBUST)
def test_a_broken_part_is_left_out(honest, rule):
    broken = honest[:5].clone()
    broken[4, 7] = float("nan")
    torch.testing.assert_close(reduce(rule, broken), reduce(rule, honest[:4]))


@pytest.mark.parametrize("rule", ROBUST)
def test_stale_weights_have_no_say_beside_newer_ones(honest, rule):
    found = reduce(rule, honest[:5], weights=(1.0, 1.0, 1.0, STALE_WEIGHT, STALE_WEIGHT))
    torch.testing.assert_close(found, reduce(rule, honest[:3]))
    torch.testing.assert_close(reduce(rule, honest[:3], weights=[STALE_WEIGHT] * 3), reduce(rule, honest[:3]))


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("weight", [1.0, 1e9])
def test_beside_a_donor_nobody_else_counts(honest, rule, weight):
    parts = torch.cat([honest[:4], 1e11 * torch.ones(1, VALUES)])
    torch.testing.assert_close(
        reduce(rule, parts, (1.0, 1.0, 1.0, 1.0, weight), preferred=[1], max_weight=1.0), parts[1]
    )
    both = reduce(rule, parts, preferred=[1, 2])
    torch.testing.assert_close(both, parts[1:3].mean(0))


@pytest.mark.parametrize("rule", ROBUST)
def test_a_donor_with_stale_weights_has_no_say(honest, rule):
    found = reduce(rule, honest[:4], (1.0, STALE_WEIGHT, 1.0, 1.0), preferred=[1])
    torch.testing.assert_close(found, reduce(rule, honest[[0, 2, 3]]))


def test_no_weight_counts_for_more_than_twice_the_median():
    assert cap_weights(torch.tensor([1.0, 1.0, 3.0, 1e9])).tolist() == [1.0, 1.0, 3.0, 4.0]


def test_centred_clipping_is_the_loop_of_the_paper(honest):
    """The plain version: one sender and one number at a time."""
    parts = honest[:4, :50]
    distances = [[float((a - b).norm()) for b in parts] for a in parts]
    centre = parts[min(range(4), key=lambda i: sorted(distances[i])[1] + sorted(distances[i])[2])].clone()
    for _ in range(CLIPPING_ROUNDS):
        away = [float((part - centre).norm()) for part in parts]
        radius = sorted(away)[(len(away) - 1) // 2]
        step = torch.zeros_like(centre)
        for part, distance in zip(parts, away, strict=True):
            if 0 < distance <= REJECT_RADII * radius:
                step += (part - centre) * min(1.0, radius / distance) / len(parts)
        centre = centre + step
    torch.testing.assert_close(reduce("centred_clipping", parts), centre)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("attack", ["a little is enough", "inner product", "ten times the opposite"])
def test_a_peer_that_turns_bad_after_twenty_good_steps_gains_little(rule, attack):
    """Momentum SGD on |x|^2 / 2 with noisy gradients of four peers."""

    def walk(turns):
        generator = torch.Generator().manual_seed(0)
        x, momentum = torch.full((VALUES,), 3.0), torch.zeros(VALUES)
        for step in range(60):
            sent = x + 0.5 * torch.randn(4, VALUES, generator=generator)
            if turns and step >= 20:
                sent[3] = attacks(sent[:3])[attack]
            momentum = 0.5 * momentum + reduce(rule, sent)
            x = x - 0.05 * momentum
        return float(x.norm()) / VALUES**0.5

    # Shifts within the spread of honest gradients, 0.5, remain; the start is 3.
    assert walk(turns=True) < 0.5 * 0.5
    assert walk(turns=False) < 0.1


def test_distances_are_those_of_each_pair_however_close_together(monkeypatch):
    monkeypatch.setattr(aggregation_rules, "PRODUCT_COLUMNS", 1000)
    parts = 100 * torch.randn(VALUES, generator=torch.Generator().manual_seed(0)) + 1e-4 * torch.randn(
        6, VALUES, generator=torch.Generator().manual_seed(1)
    )
    twin = torch.stack([(parts.double() - part.double()).norm(dim=1) for part in parts])
    torch.testing.assert_close(aggregation_rules.pairwise_distances(parts), twin, rtol=1e-2, atol=1e-9)
