"""What happens to a request, whoever else draws."""

import threading
from contextlib import closing

import pytest
import torch
from PIL import Image

from demo.form import first_rows, read_request
from demo.service.drawing_service import Done, DrawingService, Queued, Running
from demo.service.latency_model import LatencyModel
from demo.service.scheduler import Busy, Scheduler
from inference.generator import Generator
from inference.request import Request, Settings
from tests.demo.conftest import encoded, failing_service

WISH = {"num_images": 6, "best": 2, "top_k": 0, "top_p": 1.0, "seed": 3}


def request(prompt="a red heart", seed=3):
    return Request(prompt, Settings(num_images=6, best=2, seed=seed))


def codes_of(pictures):
    return [picture.codes.tolist() for picture in pictures]


def test_a_request_is_drawn_as_the_generator_draws_it(service):
    *_, last = service.draw(request())
    expected = service.generator("a red heart", num_images=6, best=2, seed=3)
    assert isinstance(last, Done)
    assert codes_of(last.pictures) == codes_of(expected)
    assert [picture.score for picture in last.pictures] == [picture.score for picture in expected]


def test_the_pictures_are_seen_growing(service, monkeypatch):
    monkeypatch.setattr("demo.service.drawing_service.PREVIEW_INTERVAL_S", 0.0)
    drawing = [event for event in service.draw(request()) if isinstance(event, Running) and event.previews]
    assert [event.share for event in drawing] == [0.25, 0.5, 0.75, 1.0]
    assert all(len(event.previews) == 4 for event in drawing)
    opaque = [event.previews[0].getchannel("A").getbbox()[3] for event in drawing]
    assert opaque == [8, 16, 24, 32]


def test_requests_by_turns_are_not_mixed_up(service):
    requests = [request("a red heart", seed=1), request("a green book", seed=2)]
    drawings = [service.draw(one) for one in requests]
    last = [None, None]
    running = [0, 1]
    while running:
        for which in list(running):
            try:
                last[which] = next(drawings[which])
            except StopIteration:
                running.remove(which)
    for one, event in zip(requests, last, strict=True):
        alone = service.generator(one.prompt, num_images=6, best=2, seed=one.settings.seed)
        assert codes_of(event.pictures) == codes_of(alone)


def test_many_threads_get_what_they_asked_for(generator, latency):
    service, answers = DrawingService(generator, latency, scheduler=Scheduler(3, 9)), {}

    def ask(seed):
        *_, answers[seed] = service.draw(request(seed=seed))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed in range(12):
        assert codes_of(answers[seed].pictures) == codes_of(generator("a red heart", num_images=6, best=2, seed=seed))
    assert len(service.scheduler) == 0


def test_the_third_waits_and_the_fourth_is_sent_away(service):
    with closing(service.draw(request())) as first, closing(service.draw(request())) as second:
        assert isinstance(next(first), Running)
        assert isinstance(next(second), Running)
        with closing(service.draw(request())) as third:
            waiting = next(third)
            assert isinstance(waiting, Queued)
            assert waiting.line == 1
            assert waiting.seconds > 0
            with pytest.raises(Busy):
                next(service.draw(request()))
            first.close()
            assert isinstance(next(third), Running)


def test_a_cancelled_drawing_frees_its_place_and_its_turn(service):
    for _ in range(5):
        drawing = service.draw(request())
        next(drawing)
        drawing.close()
    assert len(service.scheduler) == 0
    assert service.scheduler.run(lambda: "free") == "free"


def test_a_failed_drawing_frees_its_place(generator, latency):
    service = failing_service(generator, latency, RuntimeError("out of order"))
    with pytest.raises(RuntimeError, match="out of order"):
        list(service.draw(request()))
    assert len(service.scheduler) == 0


def test_the_time_left_counts_those_who_draw_at_the_same_time(generator):
    service = DrawingService(generator, scheduler=Scheduler(2, 0))
    with closing(service.draw(request())) as first:
        alone = next(first)
        with closing(service.draw(request())) as second:
            next(second)
            together = next(first)
    assert (alone.others, together.others) == (0, 1)
    assert together.seconds > 0


def test_the_first_row_corrects_a_startup_measured_on_a_busy_machine(generator):
    service = DrawingService(generator, LatencyModel(4, {8: 60.0, 64: 480.0}))
    with closing(service.draw(request())) as drawing:
        assert next(drawing).seconds == 240
        assert next(drawing).seconds < 60


@pytest.mark.parametrize(
    ("prompt", "values", "said"),
    [
        (" ", WISH, "the prompt is empty"),
        ("x" * 1001, WISH, "1001 characters"),
        ("a car", {**WISH, "num_images": 129}, "at most 128"),
        ("a car", {**WISH, "num_images": 128, "best": 17}, "at most 16"),
    ],
)
def test_a_request_has_bounds(service, prompt, values, said):
    with pytest.raises(ValueError, match=said):
        read_request(service, prompt, **values)


def test_an_upload_is_continued_from_its_upper_rows(service):
    upload = encoded(Image.new("RGB", (32, 32), "red"))
    codes = service.read_upload(upload)
    *_, last = service.draw(read_request(service, "a red heart", upload, 2, **WISH))
    for picture in last.pictures:
        assert picture.codes[:8].tolist() == codes[:8].tolist()
    assert len({tuple(picture.codes.tolist()) for picture in last.pictures}) == 2


@pytest.mark.parametrize("rows", [0, 4, 1.5, None])
def test_rows_that_cannot_be_kept_are_refused(service, rows):
    with pytest.raises(ValueError, match="1 to 3 can be kept"):
        first_rows(service, torch.zeros(16, dtype=torch.long), rows)


def test_a_model_without_clip_draws_only_what_is_shown(generator, latency):
    service = DrawingService(Generator(generator.model, generator.tokenizer, generator.vqgan), latency)
    *_, last = service.draw(read_request(service, "a red heart", num_images=1, best=3, top_k=0))
    assert [picture.index for picture in last.pictures] == [0, 1, 2]


def test_a_loaded_generator_computes_on_one_thread_alone(generator, latency, monkeypatch):
    threads = []

    def make():
        threads.append(threading.get_ident())
        return generator

    service = DrawingService.load(make)
    step = service._step
    monkeypatch.setattr(service, "_step", lambda *given: threads.append(threading.get_ident()) or step(*given))
    for _ in service.draw(Request("a red heart", Settings(num_images=4, best=1))):
        pass
    assert len(threads) > 2
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads
