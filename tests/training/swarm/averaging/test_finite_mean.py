"""The mean of several peers' tensors stays valid, whatever one of them sends."""

import asyncio
import math

import pytest
import torch

from training.swarm.averaging.aggregation_rules import MAX_MAGNITUDE, PartReducer
from training.swarm.averaging.state_averager import STALE_WEIGHT

NAN, INF = math.nan, math.inf
WEIGHTS = (3.0, 1.0, 4.0)
NO_WEIGHTS = (0.0, -1.0, NAN, INF)


@pytest.fixture
def parts():
    return torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))  # [senders, parts, values]


def reduce(parts, weights, **options):
    """The answers to the senders: [senders, parts, values]."""

    async def send(reducer, number):
        return [
            await reducer.accumulate_part(number, place, part, weight=weights[number])
            for place, part in enumerate(parts[number])
        ]

    async def run():
        reducer = PartReducer(tuple(part.shape for part in parts[0]), len(parts), **options)
        return await asyncio.gather(*(send(reducer, number) for number in range(len(parts))))

    return torch.stack([torch.stack(got) for got in asyncio.run(run())])


def plain_mean(parts, weights):
    return sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("weights", "options", "counted"),
    [
        pytest.param(WEIGHTS, {}, WEIGHTS, id="three samples, one and four"),
        *(pytest.param((3.0, weight, 4.0), {}, (3.0, 0.0, 4.0), id=f"a weight of {weight}") for weight in NO_WEIGHTS),
        pytest.param((3.0, 1e9, 4.0), {"max_weight": 8.0}, (3.0, 8.0, 4.0), id="a weight above the largest"),
        pytest.param(WEIGHTS, {"excluded": [2]}, (3.0, 1.0, 0.0), id="a sender that is left out"),
    ],
)
def test_all_get_the_mean_of_what_each_sender_counts_for(parts, weights, options, counted):
    for got in reduce(parts, weights, **options):
        torch.testing.assert_close(got, plain_mean(parts, counted))


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30, -2 * MAX_MAGNITUDE])
def test_one_bad_number_costs_its_sender_that_part_alone(parts, bad):
    sent = parts.clone()
    sent[1, 0, 7] = bad
    for got in reduce(sent, WEIGHTS):
        torch.testing.assert_close(got[0], plain_mean(parts[[0, 2], 0], (3.0, 4.0)))
        torch.testing.assert_close(got[1], plain_mean(parts[:, 1], WEIGHTS))


def test_stale_weights_count_for_nothing_beside_others_and_equally_among_themselves(parts):
    for got in reduce(parts, (1.0, STALE_WEIGHT, 1.0)):
        torch.testing.assert_close(got, plain_mean(parts[[0, 2]], (1.0, 1.0)), rtol=0, atol=1e-5)
    for got in reduce(parts, (STALE_WEIGHT,) * 3):
        torch.testing.assert_close(got, parts.mean(0))


def test_what_a_sender_counted_for_is_kept_part_by_part(parts):
    async def run():
        reducer = PartReducer(tuple(part.shape for part in parts[0]), 3, max_weight=3.5, excluded=[1])
        sent = parts.clone()
        sent[2, 0, 7] = NAN
        await asyncio.gather(
            *(
                reducer.accumulate_part(number, place, sent[number, place], weight=WEIGHTS[number])
                for place in range(2)
                for number in range(3)
            )
        )
        return reducer.counted_weights

    assert asyncio.run(run()) == [2 * 3.0, 0.0, 3.5]


def test_where_nobody_brings_anything_the_result_is_one_that_nobody_takes(parts):
    assert reduce(parts, (0.0, 0.0, 0.0)).isnan().all()


@pytest.mark.parametrize("wrong", [torch.zeros(0), torch.ones(1), torch.ones(9), torch.ones(8, dtype=torch.int64)])
def test_a_part_that_does_not_fit_costs_its_sender_that_part_and_nobody_waits(wrong):
    good = torch.arange(8.0)

    async def run():
        reducer = PartReducer((good.shape,), 2)
        sent = [reducer.accumulate_part(0, 0, good, 1.0), reducer.accumulate_part(1, 0, wrong, 1.0)]
        return await asyncio.wait_for(asyncio.gather(*sent), 5)

    for got in asyncio.run(run()):
        torch.testing.assert_close(got, good)


def test_a_sender_that_hangs_up_while_it_waits_spoils_the_part_of_nobody(parts):
    async def run():
        reducer = PartReducer((parts[0, 0].shape,), len(parts))
        sent = [asyncio.create_task(reducer.accumulate_part(number, 0, parts[number, 0])) for number in range(2)]
        await asyncio.sleep(0.01)
        sent[1].cancel()
        await asyncio.sleep(0.01)
        return await asyncio.gather(sent[0], reducer.accumulate_part(2, 0, parts[2, 0]))

    for got in asyncio.run(run()):
        torch.testing.assert_close(got, parts[:, 0].mean(0))
