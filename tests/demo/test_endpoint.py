"""The page's endpoint, as programs use it."""

import json
import re
from pathlib import Path

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from demo.service.drawing_service import DrawingService
from demo.service.latency_model import LatencyModel
from demo.service.scheduler import Scheduler
from inference import Generator
from inference.gallery import codes_sha256
from inference.request import Settings
from tests.demo.conftest import failing_service, served

GUIDE = Path(__file__).parents[2] / "docs" / "page.md"
SETTINGS = {"num_images": 6, "best": 2, "top_k": 0, "top_p": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def client(page_url):
    return Client(page_url, verbose=False, analytics_enabled=False)


def test_the_endpoint_draws_what_the_generator_draws(client, generator):
    pictures, facts = client.predict("a red heart", **SETTINGS, api_name="/draw")
    expected = generator("a red heart", **SETTINGS)
    assert facts["prompt"] == "a red heart"
    assert [one["codes_sha256"] for one in facts["pictures"]] == [codes_sha256(one.codes) for one in expected]
    for picture, alone in zip(pictures, expected, strict=True):
        image = Image.open(picture["image"])
        assert image.convert("RGB").tobytes() == alone.image.tobytes()
        assert json.loads(image.text["settings"])["seed"] == 3


def test_what_is_left_out_is_the_pages_default(client, generator):
    _, facts = client.predict("a red heart", num_images=6, api_name="/draw")
    expected = {"num_images": 6, "best": 4, "top_k": 64, "top_p": 0.75, "temperature": 1.0, "guidance": 1.0, "seed": 0}
    assert facts["settings"] == generator.describe(Settings(**expected))


def test_the_default_number_of_candidates_follows_the_machines_speed(generator):
    with served(DrawingService(generator, LatencyModel(4, {8: 90.0, 64: 720.0}))) as url:
        client = Client(url, verbose=False, analytics_enabled=False)
        asked = {}, {"num_images": 6}, {}
        drawn = [client.predict("a red heart", **one, api_name="/draw")[1]["settings"]["num_images"] for one in asked]
    assert drawn[:2] == [8, 6]
    assert drawn[2] > 8


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("two red hearts", []),
        ("a zeppelin & <b>ein</b> 🚀", ["zeppelin", "ein", "🚀"]),
        ("赤いハート", ["赤いハート"]),
        ("wort " * 199, ["wort"]),
    ],
)
def test_the_facts_name_the_words_that_the_model_has_not_learnt(knowing_url, prompt, unknown):
    client = Client(knowing_url, verbose=False, analytics_enabled=False)
    pictures, facts = client.predict(prompt, num_images=2, api_name="/draw")
    assert facts["unknown_words"] == unknown
    assert len(pictures) == 2


def test_of_a_model_without_a_vocabulary_the_unknown_words_are_not_known(client):
    _, facts = client.predict("a zeppelin", num_images=2, api_name="/draw")
    assert facts["unknown_words"] is None


@pytest.mark.parametrize(("num_images", "shown"), [(1, 1), (3, 3), (6, 4)])
def test_four_are_the_best_or_all_where_fewer_are_drawn(client, num_images, shown):
    pictures, facts = client.predict("a red heart", num_images=num_images, api_name="/draw")
    assert len(pictures) == facts["settings"]["best"] == shown


def test_a_model_without_clip_draws_fewer_than_four_too(generator, latency):
    with served(DrawingService(Generator(generator.model, generator.tokenizer, generator.vqgan), latency)) as url:
        client = Client(url, verbose=False, analytics_enabled=False)
        pictures, _ = client.predict("a red heart", num_images=2, api_name="/draw")
        assert len(pictures) == 2


def test_an_uploaded_picture_is_continued(client, tmp_path):
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    asked = {**SETTINGS, "picture": handle_file(tmp_path / "red.png"), "rows": 2}
    pictures, _ = client.predict("a red heart", **asked, api_name="/draw")
    given = [json.loads(Image.open(picture["image"]).text["settings"])["start"] for picture in pictures]
    assert len(given[0]) == 8
    assert given[0] == given[1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": "a car", "num_images": 2, "best": 4}, "the best 4 of 2 candidates"),
        ({"prompt": "x" * 2000}, "2000 characters"),
        ({"prompt": "a car", "num_images": 1000}, "1000 candidates: this page draws at most 128"),
        ({"prompt": "a car", "num_images": 0}, "num_images=0: must be a whole number of at least 1"),
        ({"prompt": "a car", "num_images": 6.5}, "num_images=6.5: must be a whole number"),
        ({"prompt": "a car", "num_images": "many"}, "num_images='many': must be a whole number"),
        ({"prompt": "a car", "best": 17}, "best 17: this page shows at most 16"),
        ({"prompt": "a car", "top_k": 65}, r"top_k=65: it must lie in 0\.\.64"),
        ({"prompt": "a car", "top_p": -1}, r"top_p=-1: it must lie in 0\.\.1"),
        ({"prompt": "a car", "temperature": 5}, r"temperature=5: it must lie in 0\.\.2"),
        ({"prompt": "a car", "guidance": 0.5}, r"guidance=0\.5: it must lie in 1\.\.8"),
        ({"prompt": "a car", "seed": -1}, r"seed=-1: must be a whole number in 0\.\."),
        ({"prompt": "a car", "seed": None}, "seed=None: must be a whole number"),
        ({"prompt": "a car", "top_p": None}, "top_p=None"),
        ({"prompt": "a car", "guidance": "strong"}, "guidance='strong'"),
        ({"prompt": "a car", "temperature": None}, "temperature=None"),
        ({"prompt": "a car", "top_k": None}, "top_k=None"),
        ({"prompt": "a car", "best": "all"}, "best='all'"),
        ({"prompt": None}, "the prompt is empty"),
    ],
)
def test_a_mistake_is_an_error_that_says_it_and_leaves_the_servers_terminal_alone(client, asked, said, capsys):
    with pytest.raises(AppError, match=said):
        client.predict(**asked, api_name="/draw")
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_is_no_picture_is_an_error_that_says_so(client, tmp_path):
    for name in ("evil.png", "evil.eps"):
        (tmp_path / name).write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
        with pytest.raises(AppError, match="not a picture"):
            client.predict("a car", picture=handle_file(tmp_path / name), api_name="/draw")


def test_rows_that_cannot_be_kept_are_an_error_that_says_so(client, tmp_path, capsys):
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    with pytest.raises(AppError, match="rows=4: of the picture's 4 rows, 1 to 3 can be kept"):
        client.predict("a car", picture=handle_file(tmp_path / "red.png"), rows=4, api_name="/draw")
    assert "Traceback" not in capsys.readouterr().err


def test_an_internal_error_is_an_error_that_says_so_and_the_log_has_its_traceback(generator, latency, caplog):
    with served(failing_service(generator, latency, KeyError("score"))) as url:
        client = Client(url, verbose=False, analytics_enabled=False)
        with pytest.raises(AppError, match=r"Drawing failed because of a bug in the program \(KeyError: 'score'\)"):
            client.predict("a car", num_images=6, api_name="/draw")
    assert "Traceback" in caplog.text


def test_a_full_page_says_busy(generator, latency):
    service = DrawingService(generator, latency, scheduler=Scheduler(1, 0))
    with served(service) as url, service.scheduler.ticket(30.0):
        client = Client(url, verbose=False, analytics_enabled=False)
        with pytest.raises(AppError, match="busy: try again in 30 s"):
            client.predict("a car", num_images=6, api_name="/draw")


def test_the_endpoint_can_be_left_out(service):
    with served(service, api=False) as url:
        client = Client(url, verbose=False, analytics_enabled=False)
        assert "/draw" not in client.view_api(return_format="dict", print_info=False)["named_endpoints"]
        with pytest.raises(ValueError, match="/draw"):
            client.predict("a car", api_name="/draw")


def test_the_guides_example_works_as_it_stands(page_url, tmp_path, monkeypatch):
    example = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    Image.new("RGB", (50, 40), "red").save(tmp_path / "half.png")
    monkeypatch.chdir(tmp_path)
    exec(compile(example.replace("http://127.0.0.1:7860", page_url), "docs/page.md", "exec"), {})
    assert Image.open(tmp_path / "heart.png").size == (32, 32)


def test_files_of_a_drawing_do_not_stay_behind(client, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client.predict("a red heart", **SETTINGS, api_name="/draw")
    assert [path for path in tmp_path.iterdir() if any(path.rglob("dalle_lean-*"))] == []
