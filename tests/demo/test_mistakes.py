"""What a visitor may enter, and what the page answers."""

import math
import re

import pytest

from demo.form import LARGEST_EXACT_SEED, prompt_fields
from demo.service.drawing_service import DrawingService
from demo.service.scheduler import Scheduler
from tests.demo.conftest import TAB, WISH, answer, named_actions


@pytest.mark.parametrize(
    ("prompt", "values", "said"),
    [
        ("  ", {}, "The prompt is empty; say in a few words what to draw."),
        ("zeppelin " * 222 + "ab", {}, "The prompt has 2000 characters; shorten it to 1000."),
        ("zeppelin", {"upload": b"no picture"}, "The file is not a picture"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence_and_leaves_the_pictures_on_the_page(
    knowing_service, prompt, values, said
):
    (only,) = answer(knowing_service, prompt, {**WISH, **values})
    assert "mistake" in only["status"]
    assert said in only["status"]
    assert list(only) == ["status"]


OFF = (None, "", "many", True, math.nan, math.inf, -math.inf, -1, -1e30, 10**20, 1e30)
WRONG = {
    "num_images": (*OFF, 0, 3.7, 129),
    "best": (*OFF, 0, 3.7, 17),
    "top_k": (*OFF, 0.5, 65),
    "top_p": (*OFF, 1.1),
    "temperature": (*OFF, 2.1),
    "guidance": (*OFF, 0.5, 9),
    "seed": (*OFF, 0.5, 2**53),
    "rows": (*OFF, 0, 1.5, 4),
}


def fields_of(service):
    return prompt_fields(service.generator.model.config, service.generator.scorer is not None)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, wrong in WRONG.items() for value in wrong])
def test_a_number_that_does_not_fit_its_field_is_answered_with_the_fields_label_and_range(service, name, value):
    field = fields_of(service)[name]
    (only,) = answer(service, values={**WISH, name: value})
    assert re.search(
        f"“{field.label}” must be a (whole )?number from {field.lowest} to {field.highest}[.]<", only["status"]
    )


def test_a_number_may_be_at_either_end_of_its_field_and_a_whole_one_may_come_as_a_float(service):
    for field in fields_of(service).values():
        assert [field.read(float(value)) for value in (field.lowest, field.highest)] == [field.lowest, field.highest]
    assert isinstance(fields_of(service)["seed"].read(3.0), int)


@pytest.mark.parametrize(("num_images", "shown"), [(1, 1), (3, 3), (6, 4)])
def test_the_best_four_are_shown_or_all_where_fewer_are_drawn(service, num_images, shown):
    *_, last = answer(service, values={**WISH, "num_images": num_images, "best": 4})
    assert len(last["drawn"].pictures) == shown


def draw(actions, prompt="a red heart", fresh=False, **values):
    return actions.draw(TAB, prompt, fresh, *{**WISH, **values}.values())


def test_after_a_seed_that_is_too_large_the_page_draws_again(service):
    actions = named_actions(service)
    (refused,) = draw(actions, seed=10**20)
    assert f"from 0 to {LARGEST_EXACT_SEED}." in refused["status"]
    assert "seed" not in refused
    list(draw(actions))
    assert len(actions.shown.get(TAB).drawn.pictures) == 2


def test_a_new_seed_takes_the_place_of_whatever_is_in_the_box(service):
    actions = named_actions(service)
    list(draw(actions, fresh=True, seed=None))
    assert len(actions.shown.get(TAB).drawn.pictures) == 2


def test_a_mistake_during_a_drawing_ends_it_and_leaves_no_unfinished_pictures(service):
    actions = named_actions(service)
    drawing = draw(actions)
    assert "growing" in next(drawing)["stage"]
    (refused,) = draw(actions, " ")
    assert "The prompt is empty" in refused["status"]
    assert "grow here" in refused["stage"]
    assert list(drawing) == []


def test_a_full_page_leaves_finished_pictures_where_they_are(generator, latency):
    service = DrawingService(generator, latency, scheduler=Scheduler(1, 0))
    with service.scheduler.ticket(30.0):
        (only,) = answer(service)
    assert list(only) == ["status"]


def test_the_estimate_says_which_number_it_cannot_use(service):
    actions = named_actions(service)
    assert "8 candidates take" in actions.estimate(8, None, 1)
    assert "“Candidates” must be a whole number from 1 to 128." in actions.estimate(None, 4, 1)
    assert "“Guidance” must be a number from 1 to 8." in actions.estimate(8, 4, None)
