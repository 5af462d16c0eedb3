"""Plans chosen for a budget: they fit, and more memory never buys a slower one."""

import dataclasses

import pytest

from dalle_lean import DalleConfig, MemoryPlan
from dalle_lean.memory import TrainingSetup, cost_of, largest_batch
from dalle_lean.memory.plan_search import (
    candidates,
    describe,
    effort,
    fastest_plan,
    parse_bytes,
    parse_plan,
)
from dalle_lean.words import human_bytes
from tests.dalle_lean.memory.test_cost import ONE_STREAM, TWO_STREAMS, measured_bytes

ON_CPU = {"optimizer": "adamw", "device": "cpu"}


def peaks(config, setup):
    return sorted(cost_of(config, plan, setup).peak_bytes for plan in candidates(config))


@pytest.mark.parametrize("config", [TWO_STREAMS, ONE_STREAM, DalleConfig.paper()])
def test_more_memory_never_buys_a_slower_plan(config):
    setup = TrainingSetup(batch=4, compute_dtype="bfloat16")
    smallest, *_, largest = peaks(config, setup)
    budgets = [smallest + (largest - smallest) * part / 6 for part in range(7)]
    plans = [fastest_plan(config, setup, budget) for budget in budgets]
    efforts = [effort(config, plan, setup) for plan in plans]
    assert efforts == sorted(efforts, reverse=True)
    assert efforts[0] > efforts[-1]
    for plan, budget in zip(plans, budgets, strict=True):
        assert cost_of(config, plan, setup).peak_bytes <= budget


@pytest.mark.parametrize("config", [TWO_STREAMS, ONE_STREAM])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_the_chosen_plan_fits_when_it_is_measured(config, share):
    setup = TrainingSetup(batch=3, **ON_CPU)
    smallest, *_, largest = peaks(config, setup)
    budget = smallest + (largest - smallest) * share
    plan = MemoryPlan.for_budget(config, 3, budget, **ON_CPU)
    state = cost_of(config, plan, setup).device.optimizer_state
    assert measured_bytes(config, plan, setup) + state <= 1.01 * budget


def test_with_all_the_memory_everything_is_kept_and_nothing_offloaded():
    plan = MemoryPlan.for_budget(TWO_STREAMS, 1, 1e12)
    assert plan == MemoryPlan(activations="keep", loss_tokens=None, offload_optimizer=False)


def test_bfloat16_weights_have_their_float32_copies_in_every_plan():
    setup = TrainingSetup.of_precision("bf16-weights", batch=1)
    leanest = [dataclasses.replace(plan, master_weights=True) for plan in candidates(TWO_STREAMS)]
    tight = min(cost_of(TWO_STREAMS, plan, setup).peak_bytes for plan in leanest)
    assert all(fastest_plan(TWO_STREAMS, setup, budget).master_weights for budget in (1e12, tight))


def test_where_nothing_fits_the_error_tells_the_least_and_a_batch_that_would():
    setup = TrainingSetup(batch=64, compute_dtype="bfloat16")
    least = peaks(DalleConfig.paper(), setup)[0]
    with pytest.raises(
        ValueError, match=r"batch 64 needs at least .* GB of the 2 GB allowed.*; batch \d+ would fit"
    ) as error:
        fastest_plan(DalleConfig.paper(), setup, 2e9)
    assert human_bytes(least) in str(error.value)
    batch = int(str(error.value).split("batch ")[-1].split()[0])
    assert fastest_plan(DalleConfig.paper(), dataclasses.replace(setup, batch=batch), 2e9)
    with pytest.raises(ValueError, match="needs at least"):
        fastest_plan(DalleConfig.paper(), dataclasses.replace(setup, batch=batch + 1), 2e9)
    with pytest.raises(ValueError, match="not even a batch of 1 fits"):
        MemoryPlan.for_budget(TWO_STREAMS, 1, 1e6)


def test_the_largest_batch_fits_and_one_more_does_not():
    def peak_of(batch):
        return cost_of(TWO_STREAMS, MemoryPlan(), TrainingSetup(batch=batch)).peak_bytes

    batch = largest_batch(peak_of, 2e8)
    assert peak_of(batch) <= 2e8 < peak_of(batch + 1)
    assert largest_batch(peak_of, 1e6) == 0


def test_every_candidate_is_told_in_the_words_that_it_is_read_from():
    for plan in candidates(TWO_STREAMS) + candidates(ONE_STREAM) + [MemoryPlan(), MemoryPlan(residual_dtype="float64")]:
        assert parse_plan(describe(plan)) == plan


@pytest.mark.parametrize("text", ["fast", "reversible,sample=1", "reversible,samples=0", "keep,grads_in_place=maybe"])
def test_a_malformed_plan_is_refused(text):
    with pytest.raises(ValueError, match=text.split(",")[-1].split("=")[0]):
        parse_plan(text)


@pytest.mark.parametrize(
    ("text", "count"), [("12GB", 12e9), ("512 MB", 512e6), ("8GiB", 8 * 2**30), ("1e9", 1e9), ("1.5kb", 1500)]
)
def test_amounts_of_memory_are_read_with_their_units(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "12XB", "GB", "-1GB", "0", "nan", "infGB", "1e16TB"])
def test_no_other_amount_is(text):
    with pytest.raises(ValueError, match="memory"):
        parse_bytes(text)


def test_a_bare_number_of_a_few_bytes_is_taken_for_a_forgotten_unit():
    with pytest.raises(ValueError, match=r"8 bytes; did you mean 8GB\?"):
        parse_bytes("8")


def test_float16_gets_a_plan_whose_branches_can_be_scaled():
    plan = MemoryPlan.for_budget(TWO_STREAMS, 1, 1e12, compute_dtype="float16")
    assert plan.activations == "reversible"
