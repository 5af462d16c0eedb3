"""The page in headless Chromium, as a person uses it."""

import shutil

import pytest

pytestmark = pytest.mark.browser

TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    from docs.screenshot import FLAGS

    if shutil.which("chromium") is None:
        pytest.skip("apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, page_url):
    """Opens the page at a query string; on leaving, checks that it asked no other host for anything."""
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))

    def open_page(query=""):
        page.goto(page_url + query, timeout=TIMEOUT_MS)
        page.locator("#prompt textarea, #prompt input").first.wait_for(timeout=TIMEOUT_MS)
        return page

    yield open_page
    page.close()
    assert [address for address in asked if not address.startswith((page_url, "data:", "blob:"))] == []


def prompt_box(page):
    return page.locator("#prompt textarea, #prompt input").first


def test_a_prompt_typed_and_entered_becomes_pictures(opened):
    page = opened()
    prompt_box(page).fill("a red heart")
    prompt_box(page).press("Enter")
    page.get_by_text("4 pictures, best first").wait_for(timeout=TIMEOUT_MS)
    page.locator("#gallery img").first.wait_for(timeout=TIMEOUT_MS)
    assert page.locator("#gallery .grid-container img").count() == 4


def test_an_empty_prompt_is_answered_on_the_page(opened):
    page = opened()
    page.locator("#draw").click()
    page.get_by_text("The prompt is empty").wait_for(timeout=TIMEOUT_MS)
    assert page.locator("#gallery img").count() == 0


def test_an_address_with_a_prompt_draws_it(opened):
    page = opened("?prompt=a+green+book&seed=5")
    page.get_by_text("4 pictures, best first").wait_for(timeout=TIMEOUT_MS)
    assert prompt_box(page).input_value() == "a green book"
    assert page.get_by_label("Seed", exact=False).first.input_value() == "5"


def test_the_foot_ends_with_its_only_link(opened):
    page = opened()
    page.get_by_text("Use via API").wait_for(timeout=TIMEOUT_MS)
    assert page.locator("footer").inner_text().strip() == "Use via API"
