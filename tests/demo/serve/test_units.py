"""Prompts cut into units, drawn apart and merged, without a cluster."""

import asyncio
import json

import pytest
import torch

pytest.importorskip("ray.serve", reason="pip install 'dalle-lean[serve]'")

from benchmarks.serving import fingerprint
from dalle_lean.errors import UserError
from demo.serve import drawer as drawer_module
from demo.serve.drawer import Drawer, Timer, Unit
from demo.serve.model_replicas import Model, best_of
from demo.serve.wire import event_from_json, picture_to_json, request_from_json, request_to_json
from demo.service.latency_model import LatencyModel, timed
from inference.request import Request, Settings


@pytest.fixture
def model(description):
    return Model("drawers", None, description)


@pytest.mark.parametrize(
    ("num_images", "best", "top_k"),
    [(1, 1, 0), (8, 8, 0), (20, 5, 0), (33, 16, 0), pytest.param(20, 5, 1, id="all equal")],
)
def test_units_drawn_apart_and_merged_are_what_one_machine_draws(generator, model, num_images, best, top_k):
    settings = Settings(num_images=num_images, best=best, top_k=top_k, seed=3)
    asked = Request("a red heart", settings)
    asked = request_from_json(json.loads(json.dumps(request_to_json(asked))), generator.model.config)
    drawn = []
    for unit in reversed(model.units(asked)):
        *_, last = generator.draw([unit])
        drawn += [picture_to_json(picture) for picture in last.pictures]
    event = {"state": "drawn", "pictures": best_of(drawn, asked), "seconds": 0, "described": {}}
    merged = event_from_json(json.loads(json.dumps(event)), asked).pictures
    alone = generator.run("a red heart", settings)
    assert fingerprint(merged) == fingerprint(alone)


def test_a_caller_is_told_of_the_first_row_then_at_most_every_preview_interval_and_of_the_end(generator, monkeypatch):
    monkeypatch.setattr(drawer_module, "PREVIEW_INTERVAL_S", 60.0)
    drawer = Drawer.__new__(Drawer)  # Ray Serve starts the real ones
    drawer.generator = generator
    request = Request("a red heart", Settings(num_images=2, seed=3))
    steps = []
    drawing, units, timer = timed(generator.draw([request])), [Unit(request, previews=False)], Timer(2)
    while found := drawer.step(drawing, units, timer):
        steps.append(found[1])
    assert steps[0].share > 0
    assert steps[1] is None
    assert len(steps[-1].pictures) == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "lacks memory; try fewer candidates"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lacks memory; try fewer candidates"),
        (UserError("codes of another VQGAN"), "codes of another VQGAN"),
    ],
)
def test_what_its_user_can_help_is_said_in_a_sentence(error, said):
    [step] = asyncio.run(steps_of_a_failure(error))
    assert said in step.mistake


def test_a_bug_is_no_mistake_of_its_user():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(steps_of_a_failure(ZeroDivisionError()))


async def steps_of_a_failure(error):
    """What a replica answers where drawing raises `error`."""

    async def fails(_unit):
        yield error

    drawer = Drawer.__new__(Drawer)
    drawer.draw_together = fails
    return [step async for step in drawer.draw(Request("a red heart", Settings()), previews=False)]


def test_a_prompt_takes_as_long_as_the_largest_share_of_a_replica():
    alone = LatencyModel(4, {8: 1.0, 64: 8.0})
    shared = LatencyModel(4, {8: 1.0, 64: 8.0}, replicas=4)
    assert shared.seconds(64) == alone.seconds(16)
    assert shared.seconds(65) == alone.seconds(24)
    assert shared.seconds(5) == alone.seconds(5)
