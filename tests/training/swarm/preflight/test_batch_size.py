"""The batch and the memory plan of a machine."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from dalle_lean.errors import UserError
from dalle_lean.memory import TrainingSetup, cost_of
from training.run.recipe import OptimizerRecipe, Recipe, load_recipe
from training.step import data_parallel
from training.step.gradients import GradientComputer
from training.swarm.config import SwarmSettings, WireSection
from training.swarm.optimizer.build import make_lamb
from training.swarm.optimizer.diloco import make_outer
from training.swarm.peer.gradient_worker import build_model
from training.swarm.preflight import batch_size
from training.swarm.preflight.batch_size import (
    USABLE_SHARE,
    Memory,
    batch_seconds,
    measure_batch,
    memory_needed,
    plan_batch,
    state_bytes,
)

CPU = torch.device("cpu")
RAM = 10**12
EMOJI = load_recipe("emoji64")
SIZES = {"image_side": 8, "image_vocab_size": 1024, "text_vocab_size": 2048}
SIZES |= {name: value for name, value in EMOJI.model.items() if name in SIZES}


@pytest.fixture(scope="module")
def settings():
    """A model of some millions of parameters in batches of 256."""
    recipe = dataclasses.replace(EMOJI, model={**EMOJI.model, **SIZES}, optimizer=Recipe().optimizer)
    return SwarmSettings(recipe=dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, batch_size=256)))


def there(ram_bytes):
    return Memory(device_bytes=ram_bytes, ram_bytes=ram_bytes, shared_bytes=ram_bytes)


def test_what_is_chosen_fits_and_more_would_not(settings):
    least = memory_needed(settings, settings.recipe.memory, 1, "cpu").device_bytes
    for factor in (1.2, 1.5, 2.0):
        ram = int(factor * least / USABLE_SHARE)
        plan = plan_batch(settings, CPU, there(ram))
        assert plan.needed.ram_bytes <= USABLE_SHARE * ram
        more = memory_needed(settings, plan.memory, plan.samples_at_once + 1, "cpu").ram_bytes
        assert more > USABLE_SHARE * ram or plan.samples_at_once == settings.target_batch_size // 8


def test_one_peer_never_reports_most_of_a_step_at_once(settings):
    assert plan_batch(settings, CPU, there(RAM)).batch_size == 256 // 8


def test_where_the_recipes_plan_does_not_fit_a_leaner_one_does(settings):
    greedy = dataclasses.replace(settings.recipe.memory, activations="keep", loss_tokens=None, samples=None)
    greedy_settings = dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, memory=greedy))
    needed = memory_needed(greedy_settings, greedy, 1, "cpu").device_bytes
    plan = plan_batch(greedy_settings, CPU, there(int(0.99 * needed / USABLE_SHARE)))
    assert plan.memory.activations != "keep" or plan.memory.loss_tokens is not None
    assert plan.needed.device_bytes < needed


def test_only_a_device_that_runs_fused_attention_is_counted_on_for_it(settings, monkeypatch):
    assert settings.recipe.memory.fused_attention
    assert not plan_batch(settings, CPU, there(RAM), precision="bf16").memory.fused_attention
    gpu = torch.device("cuda")
    for runs in (False, True):
        monkeypatch.setattr(data_parallel, "fused_attention_runs", lambda device, runs=runs: runs)
        assert plan_batch(settings, gpu, there(RAM), precision="bf16").memory.fused_attention == runs
    needed = memory_needed(settings, settings.recipe.memory, 1, "cuda").device_bytes
    lean = plan_batch(settings, gpu, there(int(0.99 * needed / USABLE_SHARE)), precision="bf16")
    assert lean.memory.fused_attention


def test_what_computes_gradients_has_the_plan_that_its_device_runs(settings):
    gradients = GradientComputer(build_model(settings), settings.recipe.memory, 1)
    assert settings.recipe.memory.fused_attention
    assert not gradients.memory.fused_attention


def test_a_model_that_does_not_fit_at_all_is_refused(settings):
    with pytest.raises(ValueError, match="needs at least"):
        plan_batch(settings, CPU, there(10**9))


def test_a_chosen_batch_is_computed_in_parts_that_fit(settings):
    least = memory_needed(settings, settings.recipe.memory, 1, "cpu").device_bytes
    plan = plan_batch(settings, CPU, there(int(1.2 * least / USABLE_SHARE)), batch_size=1000)
    assert plan.batch_size == 1000
    assert plan.samples_at_once == -(-1000 // plan.memory.micro_batches)
    assert plan.needed.ram_bytes <= USABLE_SHARE * 1.2 * least / USABLE_SHARE


def test_in_diloco_mode_a_step_of_ones_own_has_the_recipes_batch(settings):
    diloco = dataclasses.replace(settings, wire=WireSection(mode="diloco", inner_steps=4))
    assert plan_batch(diloco, CPU, there(RAM)).batch_size == 256


@pytest.mark.parametrize(
    ("seconds_a_sample", "report_s"), [(0.001, (0.02, 0.06)), (0.25, (1, 10)), (2.0, (1, 10)), (30.0, (30, 30))]
)
def test_a_report_takes_seconds_whatever_the_machine(settings, seconds_a_sample, report_s, monkeypatch):
    monkeypatch.setattr(batch_size, "batch_seconds", lambda _, samples: samples * seconds_a_sample)
    plan = measure_batch(settings, plan_batch(settings, CPU, there(RAM)), build_model(settings))
    assert report_s[0] <= plan.report_s <= report_s[1]
    assert plan.batch_size == plan.samples_at_once * plan.memory.micro_batches <= 256 // 8


def test_more_samples_at_once_are_taken_only_where_they_are_faster(settings, monkeypatch):
    def seconds_of(_, samples):
        return 0.2 + 0.01 * samples if samples <= 8 else samples * 1.0

    monkeypatch.setattr(batch_size, "batch_seconds", seconds_of)
    plan = measure_batch(settings, plan_batch(settings, CPU, there(RAM)), build_model(settings))
    assert plan.samples_at_once == 8


def test_weights_of_another_type_than_the_swarms_are_refused(settings):
    with pytest.raises(UserError, match="a swarm averages float32 weights"):
        plan_batch(settings, CPU, there(RAM), precision="bf16-weights")


def test_it_is_measured_on_the_real_model(settings):
    tiny = dataclasses.replace(
        settings, recipe=dataclasses.replace(settings.recipe, model={**settings.recipe.model, "num_layers": 2})
    )
    plan = measure_batch(tiny, plan_batch(tiny, CPU, there(RAM), batch_size=2), build_model(tiny), fixed=True)
    assert 0 < plan.seconds < 60
    assert plan.batch_size == 2


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_lamb, {}),
        (make_lamb, {"recipe": {"optimizer": OptimizerRecipe(min_eight_bit_numel=10**9)}}),
        (make_outer, {"wire": {"mode": "diloco", "inner_steps": 4}}),
        (make_outer, {"wire": {"mode": "diloco", "inner_steps": 4, "outer_momentum": 0.0}}),
    ],
)
def test_the_state_is_as_large_as_the_optimizers(settings, make, changes):
    parts = {name: dataclasses.replace(getattr(settings, name), **values) for name, values in changes.items()}
    settings = dataclasses.replace(settings, **parts)
    model = build_model(settings)
    optimizer = make(settings, [{"params": list(model.parameters())}])
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    real = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *tensors])
    assert state_bytes(settings) == pytest.approx(real, rel=0.02)
    assert cost_of(model.config, settings.recipe.memory, TrainingSetup()).parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("device", "pauses_s"),
    [("cpu", (0.0, 0.3, 0.01, 0.3)), ("cuda", (0.5, 0.01, 0.01, 0.01)), ("cuda", (0.5, 0.2, 0.2)), ("cpu", (0.4,))],
    ids=["busy", "compiling first", "slow GPU", "slow CPU"],
)
def test_neither_a_busy_moment_nor_compiling_makes_a_machine_slow(device, pauses_s, monkeypatch):
    pauses = iter(pauses_s)
    if device == "cuda" or len(pauses_s) == 1:
        monkeypatch.setattr(batch_size, "MAX_REPORT_S", 0.1)

    def accumulate(_batch):
        time.sleep(next(pauses))
        return torch.zeros(())

    config = SimpleNamespace(text_vocab_size=9, text_len=2, image_vocab_size=9, image_len=4)
    gradients = SimpleNamespace(
        model=SimpleNamespace(config=config), accumulate_gradient=accumulate, device=torch.device(device)
    )
    assert batch_seconds(gradients, 2) == pytest.approx(min(pauses_s[1:] or pauses_s), abs=0.1)
    assert next(pauses, None) is None
