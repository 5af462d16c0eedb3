"""An engine of two replicas, on loopback, with a tiny model."""

import threading
import time

import httpx
import pytest
import torch

from benchmarks.serving import FAST, fingerprint, processes
from dalle_lean import load_model, save_model
from demo.form import read_request
from demo.serve.client import RemoteService
from demo.service.drawing_service import Done, DrawingService, Queued, Running
from demo.service.scheduler import Busy
from inference import Generator
from inference.request import Request, Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def alone(folder):
    return Generator.from_folder(folder, device="cpu", scorer=FAST)


def request(prompt="a red heart", num_images=20, seed=3, **settings):
    return Request(prompt, Settings(num_images=num_images, best=5, top_k=0, seed=seed, **settings))


def answer(service, asked):
    *_, last = service.draw(asked)
    assert isinstance(last, Done)
    return last


def test_the_answer_is_bit_for_bit_that_of_one_machine(service, alone):
    drawn = answer(service, request())
    assert fingerprint(drawn.pictures) == fingerprint(alone.run("a red heart", request().settings))
    assert drawn.described == alone.describe(request().settings)


def test_people_at_once_get_their_own_pictures(service, alone):
    answers = {}

    def ask(seed):
        asked = request("a green book", 9 + seed, seed, guidance=2.0 if seed % 2 else 1.0)
        answers[seed] = asked, answer(service, asked)

    people = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for person in people:
        person.start()
    for person in people:
        person.join(300)
    assert len(answers) == 6
    for asked, drawn in answers.values():
        assert fingerprint(drawn.pictures) == fingerprint(alone.run(asked.prompt, asked.settings))


def test_a_killed_replicas_pictures_are_drawn_again(service, alone):
    asked = request("a house 1 s", 40)
    events = service.draw(asked)
    assert isinstance(next(events), Running)
    time.sleep(0.5)
    for process in processes("Drawer"):
        process.kill()
    *_, last = events
    assert fingerprint(last.pictures) == fingerprint(alone.run(asked.prompt, asked.settings))


def test_a_front_that_dies_is_asked_again(service, alone):
    asked = request("a house 1 s", 16)
    events = service.draw(asked)
    next(events)
    (front,) = processes("Front")
    front.kill()
    *_, last = events
    assert fingerprint(last.pictures) == fingerprint(alone.run(asked.prompt, asked.settings))


def test_the_pictures_are_seen_growing(service):
    seen = [event for event in service.draw(request("a red car 1 s", 16)) if isinstance(event, Running)]
    assert any(event.previews for event in seen)
    assert all(len(event.previews) in (0, 4) for event in seen)
    shares = [event.share for event in seen]
    assert shares == sorted(shares)


def test_a_full_line_says_so_and_how_long_and_stop_frees_the_place_at_once(service):
    # Six are drawn at once, three wait.
    drawings = [service.draw(request("two black cats 5 s", 8, seed)) for seed in range(9)]
    events = [next(drawing) for drawing in drawings]
    assert [type(event) for event in events] == 6 * [Running] + 3 * [Queued]
    assert [event.line for event in events[6:]] == [1, 2, 3]
    assert all(event.seconds > 0 for event in events[6:])
    with pytest.raises(Busy) as refused:
        next(service.draw(request()))
    assert (refused.value.served, refused.value.waiting) == (6, 3)
    assert refused.value.seconds > 0
    for drawing in drawings:
        drawing.close()
    started_s = time.monotonic()
    assert isinstance(next(service.draw(request())), Running)
    assert time.monotonic() - started_s < 3


def test_a_prompt_that_fails_spoils_no_other(service, alone):
    failures = []

    def fail():
        try:
            answer(service, request("crash 0.2 s", 8))
        except RuntimeError as error:
            failures.append(str(error))

    person = threading.Thread(target=fail)
    person.start()
    asked = request("a house 0.2 s", 16)
    assert fingerprint(answer(service, asked).pictures) == fingerprint(alone.run(asked.prompt, asked.settings))
    person.join(300)
    assert "RuntimeError" in failures[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "not a JSON object"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": "a car", "settings": {"num_images": 129}}, "at most 128"),
        ({"prompt": "a car", "settings": {"top_k": "x"}}, "whole number"),
        ({"prompt": "a car", "settings": {"model": "/etc"}}, "settings must be"),
        ({"prompt": "a car", "start": [64]}, "0..63"),
        ({"prompt": "a car", "start": [0] * 16}, "m < 16"),
        ({"prompt": "a" * 2**20}, "more than 1048576 bytes"),
    ],
)
def test_a_request_that_is_none_is_refused_in_a_sentence(engine, content, said):
    refused = httpx.post(f"{engine.address}/draw", json=content)
    assert refused.status_code == 422
    assert said in refused.json()["error"]


def test_an_uploaded_picture_is_read_shown_and_continued(service, alone, tmp_path):
    picture = alone.run("a house", request().settings)[0]
    picture.image.save(tmp_path / "house.png")
    upload = (tmp_path / "house.png").read_bytes()
    codes = alone.read_picture(picture.image)
    assert torch.equal(service.read_upload(upload), codes)
    assert service.preview(codes[:8]).tobytes() == alone.preview(codes[None, :8])[0].tobytes()
    asked = read_request(service, "a car", upload, 2, num_images=10, best=2, top_k=0, top_p=1.0, seed=3)
    drawn = answer(service, asked)
    expected = answer(DrawingService(alone, service.latency), asked)
    assert fingerprint(drawn.pictures) == fingerprint(expected.pictures)


def test_operators_see_that_it_is_healthy_ready_and_what_it_does(service, engine):
    answer(service, request())
    assert httpx.get(f"{engine.address}/-/healthz").text == "success"
    end_s = time.monotonic() + 300
    while (ready := httpx.get(f"{engine.address}/ready")).json() != {"replicas": 2} and time.monotonic() < end_s:
        time.sleep(1)  # an earlier test may have killed one
    assert (ready.status_code, ready.json()) == (200, {"replicas": 2})
    end_s, metrics = time.monotonic() + 60, ""
    while "dalle_lean_prompts" not in metrics and time.monotonic() < end_s:
        time.sleep(1)
        metrics = httpx.get(f"http://127.0.0.1:{engine.settings.metrics_port}/metrics").text
    for name in ("prompts", "pictures", "line", "replicas", "prompt_seconds"):
        assert f"dalle_lean_{name}" in metrics


def test_another_model_takes_over_and_no_prompt_is_lost_or_mixed(engine, service, folder, tmp_path):
    fresh = changed_model(folder, tmp_path / "changed")
    old = service.generator.model_sha256
    answers, end = [], threading.Event()

    def ask():
        visitor = RemoteService(engine.address)
        while not end.is_set():
            answers.append(answer(visitor, request("a house 0.2 s", 40)))

    person = threading.Thread(target=ask)
    person.start()
    try:
        engine.load(fresh)
    finally:
        time.sleep(2)
        end.set()
        person.join(300)
    expected = {}
    for path in (folder, fresh):
        generator = Generator.from_folder(path, "cpu", scorer=FAST)
        asked = request("a house 0.2 s", 40)
        expected[generator.model_sha256] = fingerprint(generator.run(asked.prompt, asked.settings))
    assert answers[0].described["model_sha256"] == old
    assert answers[-1].described["model_sha256"] != old
    for drawn in answers:
        assert fingerprint(drawn.pictures) == expected[drawn.described["model_sha256"]]


def changed_model(folder, out):
    """Another model of the same shape."""
    model = load_model(folder)
    with torch.no_grad():
        model.output.weight.mul_(-1)
    save_model(model, out, tokenizer=folder / "tokenizer.json", vqgan=folder / "vqgan")
    return out
