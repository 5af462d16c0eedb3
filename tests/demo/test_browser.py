"""The page in headless Chromium, as people use it: a tiny model, the bundled one where drawing must take seconds."""

import copy
import json
import re
import signal
import subprocess
import urllib.parse

import pytest
from PIL import Image

from dalle_lean.vocabulary import Vocabulary
from demo.service.drawing_service import DrawingService
from demo.service.latency_model import LatencyModel
from demo.service.scheduler import Scheduler
from inference import Generator
from tests.children import PROGRAM, kill_family, start
from tests.demo.conftest import own_port, served

pytestmark = pytest.mark.browser

PHONE = {"width": 360, "height": 780}


@pytest.fixture
def visit(visit):
    def open_page(url, **options):
        page = visit(url, **options)
        page.locator("#prompt input").wait_for()
        return page

    return open_page


@pytest.fixture(scope="module")
def bundled():
    return Generator.from_folder("models/emoji", device="cpu")


@pytest.fixture(scope="module")
def slow_url(bundled):
    """One prompt at once, one in line; 128 candidates of the bundled model, 8 together, take seconds."""
    latency = LatencyModel(bundled.model.config.image_side, {8: 0.05}, largest_batch=8)
    with served(DrawingService(bundled, latency, scheduler=Scheduler(1, 1))) as url:
        yield url


def ask(page, prompt):
    page.locator("#prompt input").fill(prompt)
    page.locator("#prompt input").press("Enter")


def pictures(page):
    """The addresses of the pictures, once they are there."""
    page.locator("#gallery .grid-container img").first.wait_for()
    return page.locator("#gallery .grid-container img").evaluate_all("images => images.map(image => image.src)")


def test_a_prompt_typed_and_entered_becomes_pictures(visit, page_url):
    page = visit(page_url)
    page.get_by_text("Your pictures will grow here.").wait_for()
    ask(page, "a red heart")
    assert len(pictures(page)) == 4
    page.get_by_text("The 4 best of 128, best first").wait_for()
    assert page.locator("#stop").is_disabled()
    assert page.locator(".stage").count() == 0
    assert re.match(
        r"score -?\d\.\d{3} · no. \d+\nseed \d+", page.locator("#gallery .caption-label").first.inner_text()
    )


def test_a_later_visitor_gets_the_default_that_the_machine_has_shown_since(visit, generator):
    service = DrawingService(generator, LatencyModel(4, {8: 90.0, 64: 720.0}))
    with served(service) as url:
        visit(url).get_by_text("8 candidates take about 6 min on this CPU.").first.wait_for()
        service.latency = LatencyModel(4, {8: 1.0, 64: 2.0})
        page = visit(url + "?prompt=a+red+heart")
        page.get_by_text("The 4 best of 64, best first").wait_for()
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("so the default is 64").wait_for()
        assert page.locator("#num-images input[type=number]").input_value() == "64"


def test_a_clicked_example_is_drawn(visit, page_url):
    page = visit(page_url)
    page.get_by_role("button", name="a panda").click()
    pictures(page)
    assert page.locator("#prompt input").input_value() == "a panda"


def test_the_picture_grows_and_the_time_left_is_said(visit, slow_url):
    page = visit(slow_url)
    ask(page, "a red heart")
    page.locator(".stage.growing img").first.wait_for()
    page.locator("#status .percent").wait_for()
    first = page.locator(".stage.growing img").first.get_attribute("src")
    page.wait_for_function("first => document.querySelector('.stage.growing img')?.src !== first", arg=first)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_drawing_whose_server_is_gone_says_so(visit, stopped):
    command = [*PROGRAM, "demo", "--device", "cpu", "--port", str(own_port(19160))]
    process = start(command, stdout=subprocess.PIPE, text=True)
    try:
        address = next(found[1] for line in process.stdout if (found := re.search(r"prompt page is at (\S+)", line)))
        page = visit(address)
        ask(page, "a red heart")
        page.locator("#status .percent").wait_for()
        if stopped:
            process.send_signal(signal.SIGSTOP)  # so that it goes before it can answer
            page.keyboard.press("Escape")
            page.locator("#status .stopping").wait_for()
    finally:
        kill_family(process)
    page.locator("#status").get_by_text("The page's server has stopped").wait_for()
    assert page.locator("#status .percent").count() == 0


def test_a_downloaded_picture_says_how_it_was_drawn(visit, page_url):
    page = visit(page_url + "?prompt=a+green+book&seed=5")
    pictures(page)
    page.locator("#gallery .grid-container button").nth(1).click()
    caption = page.locator("#gallery .preview .caption").inner_text()
    number = re.search(r"no\. (\d+)", caption)[1]
    page.get_by_role("button", name=f"Download no. {number}").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download no. {number}").click()
    assert download.value.suggested_filename == f"dalle_lean-seed5-no{number}.png"
    image = Image.open(download.value.path())
    assert (image.text["prompt"], image.text["seed"], image.text["index"]) == ("a green book", "5", number)
    assert json.loads(image.text["settings"])["num_images"] == 128


def test_more_like_this_keeps_the_upper_rows(visit, page_url):
    page = visit(page_url + "?prompt=a+red+heart&seed=5")
    before = pictures(page)
    page.locator("#more").click()
    page.get_by_text("The upper 2 of 4 rows were kept.").wait_for()
    after = pictures(page)
    assert set(before).isdisjoint(after)


def test_a_kept_seed_draws_the_same_again(visit, page_url):
    page = visit(page_url)
    ask(page, "a red heart")
    before = pictures(page)
    page.locator("#keep").click()
    page.get_by_text("is kept").wait_for()
    page.locator("#draw").click()
    page.get_by_text("best of 128").wait_for()
    assert pictures(page) == before


def test_an_uploaded_picture_is_shown_and_continued(visit, page_url, tmp_path):
    Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    (tmp_path / "evil.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
    page = visit(page_url)
    page.get_by_text("Continue a picture").click()
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "evil.png")
    page.locator("#given").get_by_text("The file is not a picture").wait_for()
    page.locator("#upload").get_by_label("Clear").or_(page.locator("#upload button[title=Clear]")).first.click()
    page.locator("#upload input[type=file]").set_input_files(tmp_path / "red.png")
    page.locator("#given img").wait_for()
    ask(page, "a red heart")
    page.get_by_text("The upper 2 of 4 rows were kept.").wait_for()


def test_a_mistake_is_said_and_the_page_goes_on(visit, page_url):
    page = visit(page_url)
    page.locator("#draw").click()
    page.locator(".status.mistake").get_by_text("The prompt is empty").wait_for()
    ask(page, "a red heart")
    assert len(pictures(page)) == 4


def test_a_wrong_number_is_said_on_the_page_alone_and_the_pictures_stay(visit, page_url, capfd):
    page = visit(page_url)
    ask(page, "a red heart")
    before = pictures(page)
    page.get_by_role("button", name="Settings").click()
    candidates, seed = page.locator("#num-images input[type=number]"), page.locator("#seed input")
    for wrong in ("0", "500", ""):  # the slider may correct them before the server sees them
        candidates.fill(wrong)
    candidates.fill("2")
    page.locator("#estimate").get_by_text("2 candidates take").wait_for()
    page.locator("#new-seed input").uncheck()
    for wrong in ("99999999999999999999", "1e30", ""):
        seed.fill(wrong)
        page.locator("#draw").click()
        page.locator("#status").get_by_text("“Seed” must be a whole number from 0 to 9007199254740991.").wait_for()
        assert pictures(page) == before
        seed.fill("7")
        page.locator("#draw").click()
        page.locator("#status").get_by_text("2 pictures, drawn in").wait_for()
        before = pictures(page)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("way", ["Enter", "Draw", "a panda"])
def test_a_tab_without_a_connection_says_at_once_that_it_waits_for_the_server(visit, page_url, way):
    page = visit(page_url + "?prompt=")
    page.locator("#status").get_by_text("The prompt is empty").wait_for()  # the page's greeting is over
    for _ in range(2):
        page.route("**/queue/join*", lambda route: None)
        if way == "Enter":
            ask(page, "")
        else:
            page.get_by_role("button", name=way).click()
        page.locator("#status").get_by_text("Waiting for the server.").wait_for()
        page.get_by_text("Other tabs may hold this browser's connections").wait_for()
        page.unroute("**/queue/join*")  # lets those go on that were held
        page.locator("#status").get_by_text("best of 128" if way == "a panda" else "The prompt is empty").wait_for()


def test_the_tenth_tab_of_a_browser_draws_too(visit, page_url):
    first = visit(page_url)
    others = [first.context.new_page() for _ in range(9)]  # browsers open six connections to one host
    for tab in others:
        tab.goto(page_url)
        tab.locator("#prompt input").wait_for()
    ask(others[-1], "a red heart")
    assert pictures(others[-1])


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_a_drawing_is_stopped(visit, slow_url, way):
    page = visit(slow_url)
    ask(page, "a red heart")
    page.locator(".stage.growing img").first.wait_for()
    page.locator("#stop:enabled").wait_for()
    if way == "button":
        page.locator("#stop").click()
    else:
        page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    page.locator("#stop:disabled").wait_for()
    ask(page, "a smiling face")  # its place is free
    page.locator(".stage.growing img").first.wait_for()


def test_an_answer_to_stop_that_comes_late_does_not_replace_the_drawings_last_words(visit, slow_url):
    page, held = visit(slow_url), []
    ask(page, "a red heart")
    page.locator("#stop:enabled").wait_for()
    page.route("**/run/predict*", lambda route: held.append((route, route.fetch())))
    page.locator("#stop").click()
    page.get_by_text("Stopped.").wait_for()
    for route, answer in held:
        route.fulfill(response=answer)
    assert held
    page.wait_for_timeout(500)
    assert page.locator("#status").inner_text().startswith("Stopped.")


def test_a_new_prompt_takes_the_place_of_the_one_being_drawn(visit, slow_url):
    page = visit(slow_url)
    ask(page, "a red heart")
    page.locator(".stage.growing img").first.wait_for()
    ask(page, "a smiling face")
    page.locator("#status").get_by_text("You are next").wait_for(state="detached")
    other = visit(slow_url)
    ask(other, "a blue car")
    other.get_by_text("You are next").wait_for()  # and not: busy
    page.locator("#stop").click()
    page.get_by_text("Stopped.").wait_for()


def test_two_people_at_once_get_each_their_own(visit, page_url):
    addresses = [f"{page_url}?prompt=a+red+heart&seed=1", f"{page_url}?prompt=a+green+book&seed=2"]
    alone = []
    for address in addresses:
        alone.append(pictures(visit(address)))
    together = [visit(address) for address in addresses]
    assert [pictures(page) for page in together] == alone
    assert set(alone[0]).isdisjoint(alone[1])


def test_the_second_waits_in_line_the_third_is_told_it_is_busy_and_a_closed_tab_frees_its_place(visit, slow_url):
    first, second, third = (visit(slow_url) for _ in range(3))
    ask(first, "a red heart")
    first.locator(".stage.growing img").first.wait_for()
    ask(second, "a smiling face")
    second.get_by_text("You are next; your turn comes in about").wait_for()
    ask(third, "a blue car")
    third.get_by_text("The page is busy: 1 drawing, 1 waiting. Please try again in about").wait_for()
    first.close()
    second.locator(".stage.growing img").first.wait_for()


def test_everything_is_reached_with_the_keyboard(visit, page_url):
    page = visit(page_url)
    page.keyboard.type("a red heart")  # the prompt has the focus
    page.keyboard.press("Enter")
    pictures(page)
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.innerText.split('\\n')[0]"))
    names = ["draw", "a panda", "download", "more", "keep", "Settings", "Continue a picture"]
    found = [next((place for place, name in enumerate(reached) if name == wanted), None) for wanted in names]
    assert None not in found, reached
    assert found == sorted(found)
    page.locator("#gallery .grid-container button").first.focus()
    page.keyboard.press("Enter")
    page.locator("#gallery .preview").wait_for()
    page.keyboard.press("Escape")
    page.locator("#gallery .preview").wait_for(state="detached")


@pytest.mark.parametrize("viewport", [{"width": 1200, "height": 800}, PHONE])
def test_what_the_model_has_not_learnt_is_said_above_the_pictures_and_goes_with_them(visit, knowing_url, viewport):
    page = visit(knowing_url, viewport=viewport)
    ask(page, f"a zeppelin on a red <img src=x> {'very' * 100} ground")
    said = page.locator("#unknown .unknown")
    said.wait_for()
    assert said.inner_text() == (
        f"I have not learnt to draw “zeppelin” or “{('very' * 8)[:30]}…”, so these pictures may not show them."
    )
    pictures(page)
    assert said.locator("*").count() == 0
    above, below = said.bounding_box(), page.locator("#gallery img").first.bounding_box()
    assert above["y"] + above["height"] <= below["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    ask(page, "a red heart")
    said.wait_for(state="detached")
    pictures(page)


def test_what_the_model_has_not_learnt_is_said_before_there_are_pictures(visit, bundled):
    generator = copy.copy(bundled)
    generator.vocabulary = Vocabulary({"heart": 9, "red": 9}, 9)
    latency = LatencyModel(bundled.model.config.image_side, {8: 0.05}, largest_batch=8)
    with served(DrawingService(generator, latency)) as url:
        page = visit(url, viewport=PHONE)
        ask(page, "ein rotes Herz 🚀")
        page.locator(".stage.growing").wait_for()
        page.get_by_text("I know nothing in this prompt; I do know “a red heart”.").wait_for()
        assert page.locator("#gallery img").count() == 0
        page.locator("#stop").click()
        page.get_by_text("Stopped.").wait_for()
        page.locator("#unknown .unknown").wait_for(state="detached")


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    ("prompt", "length"), [("zeppelin " * 222 + "ab", 998), ("🚀" * 2000, 1000), ("赤いハート" * 400, 1000)]
)
def test_a_prompt_of_2000_characters_is_cut_and_the_page_says_so(visit, knowing_url, prompt, length, typed):
    page = visit(
        knowing_url if typed else f"{knowing_url}?{urllib.parse.urlencode({'prompt': prompt})}", viewport=PHONE
    )
    if typed:
        ask(page, prompt)
    page.get_by_text(
        f"Only the first {length} of the prompt's 2000 characters are read; the rest is ignored."
    ).wait_for()
    page.get_by_text("I have not learnt to draw").wait_for()
    pictures(page)
    assert page.locator("#prompt input").input_value() == prompt[:length]
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_model_card_is_a_link_away(visit, page_url):
    page = visit(page_url)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="About this model").click()
    opened.value.get_by_text("with random weights.").wait_for(timeout=60_000)


def test_the_calculator_is_a_link_away(visit, page_url):
    page = visit(page_url)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="What training takes").click()
    opened.value.locator("#summary").get_by_text("paper, batch").wait_for(timeout=60_000)


def test_the_foot_ends_with_its_only_link(visit, page_url):
    page = visit(page_url)
    page.get_by_text("Use via API").wait_for()
    assert page.locator("footer").inner_text().strip() == "Use via API"
