"""The samples that one process learns from."""

import dataclasses
import math
from itertools import islice

import pytest

from tests.training.swarm.harness import TIMING, batches_of, make_settings
from training.swarm.config import WireSection
from training.swarm.peer.gradient_worker import GradientWorker

STEPS = 40


def test_peers_drop_other_captions_at_the_same_steps(shards, tmp_path):
    settings = make_settings(tmp_path, shards, "tiny", WireSection(), TIMING, 1, {"total_steps": STEPS})
    dropping = dataclasses.replace(settings.recipe.data, caption_dropout=0.5)
    settings = dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, data=dropping))
    alice, bob = (empty_at_steps(settings, tmp_path, identity) for identity in ("alice", "bob"))
    assert alice == empty_at_steps(settings, tmp_path, "alice")
    assert alice != bob
    assert all(0.2 * STEPS < sum(empty) < 0.8 * STEPS for empty in (alice, bob))


def empty_at_steps(settings, folder, identity):
    """The steps at which a peer learns from an empty caption; its batches have one sample."""
    worker = worker_of(settings)
    empty, accumulate = [], worker.gradients.accumulate_gradient

    def remembered(batch, crop=None):
        empty.append(not batch.text_ids.any())
        return accumulate(batch, crop)

    worker.gradients.accumulate_gradient = remembered
    for step, batch in enumerate(islice(batches_of(settings, folder, identity, 1), STEPS), start=1):
        worker.learn_from(batch, step)
        worker.model.zero_grad()
    return empty


@pytest.mark.parametrize(
    ("scale", "weight", "rescaled"), [(2.0**40, 1.0, 1), (1.0, 1e12, 0), (2.0**40, math.nan, 0)], ids=str
)
@pytest.mark.parametrize("mode", ["gradients", "diloco"])
def test_only_an_overflow_that_a_lower_scale_prevents_counts_as_rescaled(
    shards, tmp_path, mode, scale, weight, rescaled
):
    wire = WireSection(mode=mode, inner_steps=2)
    settings = make_settings(tmp_path, shards, "tiny", wire, TIMING, 1, {"total_steps": STEPS})
    worker = worker_of(settings, precision="fp16")
    worker.model.scales.values[:] = [scale] * worker.model.scales.count
    worker.model.weigh = lambda text_nats, image_nats: weight * (text_nats + image_nats)
    assert math.isnan(worker.learn_from(next(batches_of(settings, tmp_path, "alice", 1)), 1))
    assert worker.rescaled == rescaled


def worker_of(settings, **memory):
    """A worker whose batches have one sample."""
    plan = dataclasses.replace(settings.recipe.memory, micro_batches=1, **memory)
    return GradientWorker(settings, batch_size=1, memory=plan)
