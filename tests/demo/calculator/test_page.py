"""The calculator's page in headless Chromium."""

import pytest

from demo.server import serve_calculator
from tests.demo.conftest import own_port

pytestmark = pytest.mark.browser

DESKTOP, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 780}


@pytest.fixture(scope="module")
def url():
    server = serve_calculator("tests/demo/calculator/mine.toml", port=own_port(22860))
    yield server.local_url
    server.close(verbose=False)


@pytest.fixture
def visit(visit, url):
    def open_page(**options):
        page = visit(url, **options)
        page.locator("#plot canvas, #plot svg").first.wait_for()
        return page

    return open_page


def choose(page, model):
    page.locator("#model input").click()
    page.get_by_role("option", name=f"{model}:").click()
    page.locator("#summary").get_by_text(f"{model}, batch").wait_for()


def test_it_opens_with_the_recipe_of_the_command_line(visit):
    page = visit()
    summary = page.locator("#summary").inner_text()
    assert summary.startswith("mine, batch 2, 1280 tokens per sample: ")
    assert page.get_by_label("bf16", exact=True).is_checked()
    assert page.get_by_label("reversible").is_checked()
    assert page.locator("#tokens input").is_disabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tables_have_the_borders_of_all_else(visit, scheme):
    page = visit(color_scheme=scheme)
    for table in ("#kinds", "#holds"):
        for part in ("table", "tr", "th", "td"):
            colours = page.locator(f"{table} {part}").first.evaluate(COLOURS)
            assert colours[0] == colours[1], (table, part)


COLOURS = """element => {
    const other = document.body.appendChild(document.createElement("div"));
    other.style.border = "1px solid var(--border-color-primary)";
    return [element, other].map(one => getComputedStyle(one).borderBottomColor);
}"""


def test_switches_change_the_bars_the_batch_and_the_table(visit):
    page = visit()
    choose(page, "gpt2-large")
    page.locator("#gpu input").fill("11")
    page.locator("#summary").get_by_text(
        "A GPU of 11 GB holds not even one sample plain and not even one sample as chosen"
    ).wait_for()
    page.get_by_label("bf16", exact=True).check()
    page.get_by_label("adamw8bit").check()
    page.get_by_label("reversible").check()
    page.locator("#summary").get_by_text("not even one sample plain and a batch of 2 as chosen").wait_for()
    assert page.locator("#kinds tr").filter(has_text="low-precision weights").count() == 1
    rows = page.locator("#holds tr").filter(has_text="gpt2-large")
    assert rows.inner_text().split() == ["gpt2-large", "0", "2"]
    choose(page, "gpt2")
    assert page.get_by_label("fp32").is_checked()


def test_an_empty_or_wrong_number_is_said_and_the_terminal_stays_quiet(visit, capfd):
    page = visit()
    choose(page, "gpt2")
    fields = {"gpu": "GPU memory, GB", "batch": "Batch", "tokens": "Tokens per sample"}
    for field, label in fields.items():
        for wrong in ("", "0", "1e30"):
            page.locator(f"#{field} input").fill(wrong)
            page.locator("#summary").get_by_text(f"Not possible: “{label}” must be a").wait_for()
            page.locator(f"#{field} input").fill("8")
            page.locator("#summary").get_by_text("gpt2, batch").wait_for()
    assert "Traceback" not in capfd.readouterr().err


def test_what_the_trainer_refuses_is_a_sentence_and_the_page_goes_on(visit):
    page = visit()
    page.get_by_label("fp16", exact=True).check()
    page.get_by_label("keep", exact=True).check()
    page.locator("#summary").get_by_text("Not possible: ").wait_for()
    assert page.locator("#kinds table").count() == 0
    page.get_by_label("checkpoint").check()
    page.locator("#summary").get_by_text("mine, batch 2").wait_for()


def test_a_recipe_of_the_visitors_is_priced_and_what_is_wrong_with_it_is_said(visit):
    page = visit()
    page.locator("#own").get_by_role("button", name="Your own recipe").click()
    recipe, use = page.locator("#recipe textarea"), page.locator("#use")
    recipe.fill("[model]\nnum_layer = 8")
    use.click()
    page.locator("#summary").get_by_text("Not possible: ").wait_for()
    assert "num_layer" in page.locator("#summary").inner_text()
    recipe.fill("[model]\nnum_layers = 16\n[data]\nbatch_size = 3")
    use.click()
    page.locator("#summary").get_by_text("your recipe, batch 3").wait_for()
    assert page.locator("#model input").input_value().startswith("your recipe: ")
    before = page.locator("#summary").inner_text()
    page.get_by_label("bf16", exact=True).check()
    page.wait_for_function("before => document.querySelector('#summary').innerText !== before", arg=before)
    assert page.locator("#summary").inner_text().startswith("your recipe, batch 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
def test_nothing_is_wider_than_the_window(visit, viewport, scheme):
    page = visit(viewport=viewport, color_scheme=scheme)
    choose(page, "t5-large")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_it_is_worked_with_the_keyboard(visit):
    page = visit()
    before = page.locator("#summary").inner_text()
    page.get_by_label("fp32").focus()
    page.keyboard.press("Space")
    page.wait_for_function("before => document.querySelector('#summary').innerText !== before", arg=before)
    assert page.get_by_label("fp32").is_checked()
