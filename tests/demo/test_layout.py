"""How the page lies in the window, in headless Chromium."""

from pathlib import Path

import pytest

from demo.server import read_card
from tests.demo.conftest import served
from tests.demo.test_browser import PHONE, pictures

pytestmark = pytest.mark.browser


def test_nothing_is_wider_than_a_phone(visit, page_url):
    page = visit(page_url + "?prompt=a+red+heart&seed=1", viewport=PHONE)
    pictures(page)
    for fold in ("Settings", "Continue a picture"):
        page.get_by_role("button", name=fold).click()
    page.locator("#upload").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    boxes = [image.bounding_box() for image in page.locator("#gallery .grid-container img").all()]
    assert len({round(box["x"]) for box in boxes}) == 2  # two in a row


@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 900}, PHONE])
def test_the_caption_of_an_enlarged_picture_is_between_it_and_the_small_ones(visit, page_url, viewport):
    page = visit(page_url + "?prompt=a+red+heart&seed=1", viewport=viewport)
    pictures(page)
    page.locator("#gallery .grid-container button").first.click()
    parts = [page.locator(f"#gallery .preview {part}") for part in (".media-button", ".caption", ".thumbnails")]
    picture, caption, small = (part.bounding_box() for part in parts)
    assert picture["height"] > 200
    assert picture["y"] + picture["height"] <= caption["y"] + 1
    assert caption["y"] + caption["height"] <= small["y"] + 1


@pytest.mark.parametrize("width", [1280, 1000, 360])
def test_no_link_of_the_title_breaks_over_two_lines(visit, page_url, width):
    page = visit(page_url, viewport={"width": width, "height": 800})
    page.locator("#title a").first.wait_for()
    assert [link.evaluate("a => a.getClientRects().length") for link in page.locator("#title a").all()] == [1, 1]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1280, 360])
def test_no_word_breaks_in_the_tables_of_the_model_card(visit, service, width):
    with served(service, card=read_card(Path("models/emoji"))) as url:
        page = visit(url + "card", viewport={"width": width, "height": 800})
        for cell in ("transformer", "parameters"):
            found = page.locator("#card").get_by_text(cell, exact=True)
            found.wait_for()
            assert found.evaluate(LINES) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width


LINES = """element => {
    const text = document.createRange();
    text.selectNodeContents(element);
    return new Set([...text.getClientRects()].map(box => box.top)).size;
}"""
