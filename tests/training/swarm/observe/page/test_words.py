"""The texts on the run's page are true of the run."""

from dataclasses import replace

import pytest

pytest.importorskip("hivemind")

from tests.training.swarm.observe.page.simulated import settings_of
from training.swarm.config import ADMISSIONS, COMPRESSIONS, SwarmSettings
from training.swarm.observe.page import words


def changed(section: str, **fields: object) -> SwarmSettings:
    """A tiny run with other settings in a section."""
    settings = settings_of(100)
    return replace(settings, **{section: replace(getattr(settings, section), **fields)})


def with_model(**fields: object) -> SwarmSettings:
    return changed("recipe", model={**settings_of(100).recipe.model, **fields})


def with_memory(activations: str) -> SwarmSettings:
    return changed("recipe", memory=replace(settings_of(100).recipe.memory, activations=activations))


def test_only_of_an_open_run_it_says_that_anybody_can_take_part():
    said = {admission: " ".join(words.security(changed("swarm", admission=admission))) for admission in ADMISSIONS}
    assert [admission for admission in ADMISSIONS if "Anybody" in said[admission]] == ["open"]
    assert "invited" in said["invite"]
    assert "list" in said["list"]


def test_it_promises_no_robust_average_where_the_run_takes_the_mean():
    assert "cannot steer" in words.security(changed("wire", aggregation="centred_clipping"))[0]
    assert "can spoil" in words.security(changed("wire", aggregation="mean"))[0]


def test_it_names_the_bits_that_travel():
    said = {one: words.how_it_trains(changed("wire", compression=one)) for one in COMPRESSIONS}
    assert ["in 32 bits" in said["fp32"], "in 16 bits" in said["fp16"], "in 8 bits" in said["8bit"]] == [True] * 3
    assert "rank 4 (PowerSGD)" in words.how_it_trains(changed("wire", power_sgd_rank=4))


def test_of_a_run_with_many_steps_between_two_exchanges_it_says_so():
    assert "takes 7 steps" in words.how_it_trains(changed("wire", mode="diloco", inner_steps=7))


def test_it_says_that_layers_share_weights_only_where_they_do():
    assert "share 3 sets of weights" in words.what_it_trains(with_model(num_layers=6, shared_blocks=2))
    assert "share" not in words.what_it_trains(with_model(shared_blocks=None))


def test_it_says_that_training_recomputes_only_where_it_does():
    assert "recomputes" in words.what_it_trains(with_memory("reversible"))
    assert "recomputes" not in words.what_it_trains(with_memory("keep"))
